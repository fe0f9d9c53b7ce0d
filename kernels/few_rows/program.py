"""The programs of `kernel.py`: a product of few rows, and what may end it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.cache_write.kernel import rounded
from specdec.kernels.chain import ask_for_bytes
from specdec.kernels.gated_act.kernel import silu_times


@triton.jit
def _ask_for_rows(rows_ptr, first, K: tl.constexpr, COUNT: tl.constexpr):
    """COUNT elements from `first` on of each row, in pieces; nothing past the row's K."""
    PIECES: tl.constexpr = (COUNT + 127) // 128
    PIECE: tl.constexpr = COUNT // PIECES
    BYTES: tl.constexpr = PIECE * rows_ptr.dtype.element_ty.primitive_bitwidth // 8
    at = tl.minimum(first + tl.arange(0, PIECES) * PIECE, K - PIECE)
    address = rows_ptr[:, None] + at[None, :]
    ask_for_bytes(address, tl.full(address.shape, BYTES, tl.int32))


@triton.jit
def _weights(rows_ptr, at, is_own, K: tl.constexpr, INSIDE: tl.constexpr, UPCAST: tl.constexpr):
    """[K part, outputs]: elements `at` of each row; masked where they may lie past K, and where
    `is_own`, if there is one, is False."""
    pointers = rows_ptr[None, :] + at[:, None]
    if INSIDE and is_own is None:
        weights = tl.load(pointers)
    elif INSIDE:
        weights = tl.load(pointers, mask=is_own[None, :], other=0.0)
    elif is_own is None:
        weights = tl.load(pointers, mask=(at < K)[:, None], other=0.0)
    else:
        weights = tl.load(pointers, mask=(at < K)[:, None] & is_own[None, :], other=0.0)
    return weights.to(tl.float32) if UPCAST else weights


@triton.jit
def _activations(rows_ptr, at, is_row, K: tl.constexpr, INSIDE: tl.constexpr, UPCAST: tl.constexpr):
    """[rows, K part]; masked as `_weights`."""
    mask = is_row[:, None]
    if not INSIDE:
        mask = mask & (at < K)[None, :]
    x = tl.load(rows_ptr[:, None] + at[None, :], mask=mask, other=0.0)
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def _of_outputs(weights, col, N: tl.constexpr):
    """[K part, outputs] with zeros for outputs past N."""
    return tl.where((col < N)[None, :], weights, 0.0)


@triton.jit
def _sum_of_parts(place, size, is_out, SPLIT: tl.constexpr):
    total = tl.load(place, mask=is_out, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, SPLIT):
        total += tl.load(place + part * size, mask=is_out, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _plus_bias(sums, bias_ptr, at, is_own):
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + at, mask=is_own, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _store_sum(
    out,  # [rows, outputs] fp32
    residual_ptr,  # [num_rows, N]
    norm_ptr,  # [N]
    normed_ptr,  # [num_rows, N]
    summed_ptr,  # [num_rows, N]
    sums_ptr,  # [tiles, num_rows]
    num_rows,
    place,  # [rows, outputs]
    row,
    col,
    is_out,
    N: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The stream, its row times the norm's weight, and this tile's part of its squares."""
    dtype = summed_ptr.dtype.element_ty
    before = tl.load(residual_ptr + place, mask=is_out, other=0.0).to(tl.float32)
    summed = rounded(rounded(out, dtype, EXACT).to(tl.float32) + before, dtype, EXACT)
    tl.store(summed_ptr + place, summed, mask=is_out)
    stream = tl.where(is_out, summed.to(tl.float32), 0.0)
    norm = tl.load(norm_ptr + col, mask=col < N, other=0.0).to(tl.float32)
    tl.store(normed_ptr + place, rounded(stream * norm[None, :], dtype, EXACT), mask=is_out)
    at = tl.program_id(0) * num_rows + row
    tl.store(sums_ptr + at, tl.sum(stream * stream, axis=1), mask=row < num_rows)


@triton.jit
def _store_heads(
    first,  # [rows, pairs] fp32, dimension d of a head
    second,  # [rows, pairs] fp32, dimension d + HALF
    query_ptr,  # [num_rows, HQ, 2 * HALF]
    key_cache_ptr,  # [num_slots, HKV, 2 * HALF]
    value_cache_ptr,  # [num_slots, HKV, 2 * HALF]
    cos_ptr,  # [num_rows, 2 * HALF]
    sin_ptr,  # [num_rows, 2 * HALF], negated in the first half
    slots_ptr,  # [num_rows]
    num_rows,
    row,
    col,
    is_out,
    HALF: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Pairs rotated as `cache_write` does: queries as rows, keys and values into the cache."""
    dtype = query_ptr.dtype.element_ty
    row = row.to(tl.int64)
    head, dim = col // HALF, col % HALF
    a, b = rounded(first, dtype, EXACT).to(tl.float32), rounded(second, dtype, EXACT).to(tl.float32)
    table = row[:, None] * (2 * HALF) + dim[None, :]
    turned = is_out & (head < HQ + HKV)[None, :]
    cos = tl.load(cos_ptr + table, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=turned, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + table + HALF, mask=turned, other=1.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + table + HALF, mask=turned, other=0.0).to(tl.float32)
    # products round to the model's type where torch's do; values are turned by nothing
    x = rounded(rounded(a * cos, dtype, EXACT).to(tl.float32) + b * sin, dtype, EXACT)
    y = rounded(rounded(b * cos_2, dtype, EXACT).to(tl.float32) + a * sin_2, dtype, EXACT)
    is_query = is_out & (head < HQ)[None, :]
    place = query_ptr + ((row * HQ)[:, None] + head[None, :]) * (2 * HALF) + dim[None, :]
    tl.store(place, x, mask=is_query)
    tl.store(place + HALF, y, mask=is_query)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=0)
    place = ((slot * HKV)[:, None] + (head - HQ)[None, :]) * (2 * HALF) + dim[None, :]
    is_key = turned & (head >= HQ)[None, :]
    tl.store(key_cache_ptr + place, x, mask=is_key)
    tl.store(key_cache_ptr + place + HALF, y, mask=is_key)
    place -= HKV * (2 * HALF)
    is_value = is_out & (head >= HQ + HKV)[None, :]
    tl.store(value_cache_ptr + place, x, mask=is_value)
    tl.store(value_cache_ptr + place + HALF, y, mask=is_value)


@triton.jit
def few_rows_program(
    x_ptr,  # [num_rows, K] at its stride
    weight_ptr,  # [N, K]; paired [2 N, K]
    bias_ptr,  # as many as weight's rows, or None
    out_ptr,  # [num_rows, N]; of heads [num_rows, HQ, 2 * HALF]
    partial_ptr,  # [SPLIT, num_rows, N] fp32; paired [2, SPLIT, num_rows, N]
    arrived_ptr,  # [tiles] int32, zeros
    squares_ptr,  # [SQUARES, num_rows] fp32 where x is a `Normed`, else None
    eps,
    residual_ptr,  # [num_rows, N] where the product is added to a stream, else None; so too
    norm_ptr,  # [N]
    summed_ptr,  # [num_rows, N]
    sums_ptr,  # [tiles, num_rows] fp32
    key_cache_ptr,  # [num_slots, HKV, 2 * HALF] where the outputs are heads, else None; so too
    value_cache_ptr,  # [num_slots, HKV, 2 * HALF]
    cos_ptr,  # [num_rows, 2 * HALF]
    sin_ptr,  # [num_rows, 2 * HALF]
    slots_ptr,  # [num_rows]
    num_rows,
    X_STRIDE: tl.constexpr,  # a constant, so that 16 bytes of a row are one copy
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,  # outputs of a program
    BLOCK: tl.constexpr,  # the same, or the next power of two
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
    HELD: tl.constexpr,
    LATE: tl.constexpr,
    GATED: tl.constexpr,
    SQUARES: tl.constexpr,
    HALF: tl.constexpr,  # of a head
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    UPCAST: tl.constexpr,
    EXACT: tl.constexpr,  # round bf16 by hand
    OVERLAP: tl.constexpr,
):
    HEADS: tl.constexpr = tl.constexpr(key_cache_ptr is not None)
    PAIRED: tl.constexpr = GATED or HEADS
    tile = tl.program_id(0)
    part = tl.program_id(1)
    steps: tl.constexpr = ((K + STEP - 1) // STEP + SPLIT - 1) // SPLIT
    inside: tl.constexpr = K % (STEP * SPLIT) == 0
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    col = tile * COLS + lane
    is_own = None if BLOCK == COLS else lane < COLS
    k = tl.arange(0, STEP)
    first = part * (steps * STEP)
    is_row = row < num_rows
    # outputs past the last repeat its row, and are not stored
    weight_row = tl.minimum(col, N - 1)
    if HEADS:  # a pair is dimensions d and d + HALF of a head
        weight_row = weight_row // HALF * (2 * HALF) + weight_row % HALF
    other: tl.constexpr = HALF if HEADS else N  # from a pair's first row to its second
    weight_rows = weight_ptr + weight_row.to(tl.int64) * K
    x_rows = x_ptr + row.to(tl.int64) * X_STRIDE
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        if AHEAD > 0:
            _ask_for_rows(weight_rows, first, K, AHEAD * STEP)
            if PAIRED:
                _ask_for_rows(weight_rows + other * K, first, K, AHEAD * STEP)
    if HELD > 0:  # on their way into registers while the kernel before runs out
        held_at = first + tl.arange(0, HELD * STEP)
        held_gate = _weights(weight_rows, held_at, is_own, K, inside, UPCAST)
        if PAIRED:
            held_up = _weights(weight_rows + other * K, held_at, is_own, K, inside, UPCAST)
    if OVERLAP:
        gdc_wait()
    if squares_ptr is not None:
        index = tl.arange(0, triton.next_power_of_2(SQUARES))
        squares = tl.load(
            squares_ptr + index[:, None] * num_rows + row[None, :],
            mask=(index < SQUARES)[:, None] & is_row[None, :],
            other=0.0,
        )
    if HELD > 0:
        held_x = _activations(x_rows, held_at, is_row, K, inside, UPCAST)
    gate = tl.zeros((ROWS, BLOCK), tl.float32)
    up = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(HELD, steps):
        at = first + step * STEP + k
        x = _activations(x_rows, at, is_row, K, inside, UPCAST)
        w = _weights(weight_rows, at, is_own, K, inside, UPCAST)
        gate = tl.dot(x, w, gate, input_precision="ieee")
        if PAIRED:
            w = _weights(weight_rows + other * K, at, is_own, K, inside, UPCAST)
            up = tl.dot(x, w, up, input_precision="ieee")
    if OVERLAP and LATE:
        gdc_launch_dependents()
    if HELD > 0:
        # Last, so that nothing waits for these loads before the loop's are on their way; what is
        # selected here comes from registers, where a dot alone would go through memory at once.
        held_x = tl.where(is_row[:, None], held_x, 0.0)
        gate = tl.dot(held_x, _of_outputs(held_gate, col, N), gate, input_precision="ieee")
        if PAIRED:
            up = tl.dot(held_x, _of_outputs(held_up, col, N), up, input_precision="ieee")
    is_col = col < N
    if is_own is not None:
        is_col = is_col & is_own
    is_out = is_row[:, None] & is_col[None, :]
    last = True
    if SPLIT > 1:
        place = partial_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
        size = num_rows * N
        tl.store(place + part * size, gate, mask=is_out)
        if PAIRED:
            tl.store(place + (SPLIT + part) * size, up, mask=is_out)
        tl.debug_barrier()  # the whole program has stored before it counts as arrived
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            gate = _sum_of_parts(place, size, is_out, SPLIT)
            if PAIRED:
                up = _sum_of_parts(place + SPLIT * size, size, is_out, SPLIT)
            tl.store(arrived_ptr + tile, 0)
        if squares_ptr is not None:
            scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)[:, None]
            gate *= scale
            if PAIRED:
                up *= scale
        gate = _plus_bias(gate, bias_ptr, weight_row, is_col)
        if PAIRED:
            up = _plus_bias(up, bias_ptr, weight_row + other, is_col)
        if HEADS:
            _store_heads(
                gate,
                up,
                out_ptr,
                key_cache_ptr,
                value_cache_ptr,
                cos_ptr,
                sin_ptr,
                slots_ptr,
                num_rows,
                row,
                col,
                is_out,
                HALF,
                HQ,
                HKV,
                EXACT,
            )
        else:
            out_at = row.to(tl.int64)[:, None] * N + col[None, :]
            if residual_ptr is not None:
                _store_sum(
                    gate,
                    residual_ptr,
                    norm_ptr,
                    out_ptr,
                    summed_ptr,
                    sums_ptr,
                    num_rows,
                    out_at,
                    row,
                    col,
                    is_out,
                    N,
                    EXACT,
                )
            else:
                dtype = out_ptr.dtype.element_ty
                out = gate
                if GATED:
                    up = up.to(dtype).to(tl.float32)
                    out = silu_times(gate.to(dtype).to(tl.float32), up, dtype)
                tl.store(out_ptr + out_at, out.to(dtype), mask=is_out)
