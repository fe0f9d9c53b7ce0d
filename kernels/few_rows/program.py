"""The program of `kernel.py`: a product of few rows, and what may end it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.cache_write.kernel import rounded
from specdec.kernels.few_rows.operands import (
    ask_for_rows,
    load_rows,
    load_weights,
    plus_product,
    product,
)
from specdec.kernels.gated_act.kernel import silu_times


@triton.jit
def _of_outputs(weights, col, N: tl.constexpr):
    """[outputs, K part] with zeros for outputs past N."""
    return tl.where((col < N)[:, None], weights, 0.0)


@triton.jit
def _squares(squares_ptr, row, is_row, SQUARES: tl.constexpr):
    index = tl.arange(0, triton.next_power_of_2(SQUARES))
    return tl.load(
        squares_ptr + row[:, None] * SQUARES + index[None, :],
        mask=is_row[:, None] & (index < SQUARES)[None, :],
        other=0.0,
    )


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
    before,  # [rows, outputs] the stream
    norm,  # [outputs] the norm's weight
    normed_ptr,  # [num_rows, N]
    summed_ptr,  # [num_rows, N]
    sums_ptr,  # [num_rows, tiles]
    num_rows,
    place,  # [rows, outputs]
    row,  # [rows]
    is_out,  # [rows, outputs]
    EXACT: tl.constexpr,
):
    """The stream, the stream times the norm's weight, and this tile's part of a row's squares."""
    dtype = summed_ptr.dtype.element_ty
    summed = rounded(
        rounded(out, dtype, EXACT).to(tl.float32) + before.to(tl.float32), dtype, EXACT
    )
    tl.store(summed_ptr + place, summed, mask=is_out)
    stream = tl.where(is_out, summed.to(tl.float32), 0.0)
    normed = rounded(stream * norm.to(tl.float32)[None, :], dtype, EXACT)
    tl.store(normed_ptr + place, normed, mask=is_out)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums_ptr + at, tl.sum(stream * stream, axis=1), mask=row < num_rows)


@triton.jit
def few_rows_program(
    x_ptr,  # [num_rows, K] at its stride
    weight_ptr,  # [N, K]; gated [2 N, K]; bytes are e4m3 values
    scale_ptr,  # [ceil(N / SCALED), ceil(K / SCALED)] fp32, gated of 2 N; None without
    bias_ptr,  # as many as weight's rows, or None
    out_ptr,  # [num_rows, N]
    partial_ptr,  # [SPLIT, num_rows, N] fp32; gated [2, SPLIT, num_rows, N]
    arrived_ptr,  # [tiles] int32, zeros
    squares_ptr,  # [num_rows, SQUARES] fp32 where x is a `Normed`, else None
    eps,
    residual_ptr,  # [num_rows, N] where the product is added to a stream, else None; so too
    norm_ptr,  # [N]
    summed_ptr,  # [num_rows, N]
    sums_ptr,  # [num_rows, tiles] fp32
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
    SWAP_AB: tl.constexpr,  # weights first: sums are [outputs, rows] until all are in
    SQUARES: tl.constexpr,
    SQUARES_FIRST: tl.constexpr,  # read before the products, where they find registers
    SCALED: tl.constexpr,  # with scales a multiple of STEP
    UPCAST: tl.constexpr,
    COMPILED: tl.constexpr,
    EXACT: tl.constexpr,  # round bf16 by hand
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    steps: tl.constexpr = ((K + STEP - 1) // STEP + SPLIT - 1) // SPLIT
    inside: tl.constexpr = K % (STEP * SPLIT) == 0
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    col = tile * COLS + lane
    is_own = None if BLOCK == COLS else lane < COLS
    is_row = row < num_rows
    is_col = col < N
    if is_own is not None:
        is_col = is_col & is_own
    is_out = is_row[:, None] & is_col[None, :]
    out_at = row.to(tl.int64)[:, None] * N + col[None, :]
    dtype = tl.float32 if UPCAST else x_ptr.dtype.element_ty
    k = tl.arange(0, STEP)
    first = part * (steps * STEP)
    weight_row = tl.minimum(col, N - 1)  # outputs past the last repeat its row, and are not stored
    weight_rows = weight_ptr + weight_row.to(tl.int64) * K
    if SCALED % COLS == 0 and (N % COLS == 0 or not GATED):
        weight_row = tile * COLS  # all in one block
    x_rows = x_ptr + row.to(tl.int64) * X_STRIDE
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        if AHEAD > 0:
            ask_for_rows(weight_rows, first, K, AHEAD * STEP)
            if GATED:
                ask_for_rows(weight_rows + N * K, first, K, AHEAD * STEP)
    if HELD > 0:  # on their way into registers while the kernel before runs out
        held_at = first + tl.arange(0, HELD * STEP)
        held_gate = load_weights(weight_rows, held_at, is_own, dtype, K, inside, COMPILED)
        if GATED:
            held_up = load_weights(weight_rows + N * K, held_at, is_own, dtype, K, inside, COMPILED)
    if OVERLAP:
        gdc_wait()
    if squares_ptr is not None and SQUARES_FIRST:
        squares = _squares(squares_ptr, row, is_row, SQUARES)
    if residual_ptr is not None:
        before = tl.load(residual_ptr + out_at, mask=is_out, other=0.0)
        norm = tl.load(norm_ptr + col, mask=is_col, other=0.0)
    if HELD > 0:
        held_x = load_rows(x_rows, held_at, is_row, dtype, K, inside)
    gate = tl.zeros((BLOCK, ROWS) if SWAP_AB else (ROWS, BLOCK), tl.float32)
    up = tl.zeros((BLOCK, ROWS) if SWAP_AB else (ROWS, BLOCK), tl.float32)
    for step in range(HELD, steps):
        start = first + step * STEP
        at = start + k
        x = load_rows(x_rows, at, is_row, dtype, K, inside)
        w = load_weights(weight_rows, at, is_own, dtype, K, inside, COMPILED)
        gate = plus_product(gate, x, w, scale_ptr, weight_row, start, K, SCALED, SWAP_AB)
        if GATED:
            w = load_weights(weight_rows + N * K, at, is_own, dtype, K, inside, COMPILED)
            up = plus_product(up, x, w, scale_ptr, N + weight_row, start, K, SCALED, SWAP_AB)
    if OVERLAP and LATE:
        gdc_launch_dependents()
    if HELD > 0:
        # Last, so that nothing waits for these loads before the loop's are on their way; what is
        # selected here comes from registers, where a dot alone would go through memory at once
        # (with the matrix first only the weights do).
        held_x = tl.where(is_row[:, None], held_x, 0.0)
        gate = product(held_x, _of_outputs(held_gate, col, N), gate, SWAP_AB)
        if GATED:
            up = product(held_x, _of_outputs(held_up, col, N), up, SWAP_AB)
    if SWAP_AB:
        gate, up = tl.trans(gate), tl.trans(up)
    last = True
    if SPLIT > 1:
        place = partial_ptr + out_at
        size = num_rows * N
        tl.store(place + part * size, gate, mask=is_out)
        if GATED:
            tl.store(place + (SPLIT + part) * size, up, mask=is_out)
        tl.debug_barrier()  # the whole program has stored before it counts as arrived
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            gate = _sum_of_parts(place, size, is_out, SPLIT)
            if GATED:
                up = _sum_of_parts(place + SPLIT * size, size, is_out, SPLIT)
            tl.store(arrived_ptr + tile, 0)
        if squares_ptr is not None:
            if not SQUARES_FIRST:
                squares = _squares(squares_ptr, row, is_row, SQUARES)
            scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
            gate *= scale
            if GATED:
                up *= scale
        gate = _plus_bias(gate, bias_ptr, col, is_col)
        if GATED:
            up = _plus_bias(up, bias_ptr, N + col, is_col)
        if residual_ptr is not None:
            _store_sum(
                gate,
                before,
                norm,
                out_ptr,
                summed_ptr,
                sums_ptr,
                num_rows,
                out_at,
                row,
                is_out,
                EXACT,
            )
        else:
            kind = out_ptr.dtype.element_ty
            out = gate
            if GATED:
                up = up.to(kind).to(tl.float32)
                out = silu_times(gate.to(kind).to(tl.float32), up, kind)
            tl.store(out_ptr + out_at, out.to(kind), mask=is_out)
