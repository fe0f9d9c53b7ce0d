"""The attention program in Triton; `kernel.paged_attention` launches it.

A tile is up to ROWS lines of one request and one key head, a line being one query row and one of
the G query heads that share the key head. SPLITS programs share a tile's keys (arXiv 2311.01282,
section 3), each taking its part of the request's actual length, and the last to finish adds up.

Weights are rounded to the values' type. They are taken from a bound that is a power of two, not
from the largest score itself, so that they round alike however the keys are cut: a row's output in
bf16 is then the same beside any other rows but for the order of fp32 sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.chain import ask_for
from specdec.kernels.paged_attention import plan

MIN_SHARE = tl.constexpr(plan.MIN_SHARE)
PREFETCHED = tl.constexpr(2)  # iterations whose keys are asked for before the program may start


@triton.jit
def _prefetch(rows, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """`ask_for` the lines of rows of WIDTH numbers at pointers [n]."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    COUNT: tl.constexpr = (WIDTH_PAD + LINE - 1) // LINE
    line = tl.arange(0, COUNT) * LINE
    ask_for(rows[:, None] + tl.where(line < WIDTH, line, 0)[None, :])


@triton.jit
def _average(
    partial_ptr,
    weight_ptr,
    lines,  # T * Hq
    place,  # int64 [ROWS]
    is_row,
    num_parts,
    DV: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    DV_PAD: tl.constexpr,
):
    """The splits' averages by their weights, [ROWS, DV_PAD]; read past L1, which may be stale."""
    value_dim = tl.arange(0, DV_PAD)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, DV_PAD), tl.float32)
    for s in tl.static_range(SPLITS):
        is_part = is_row & (s < num_parts)
        at_split = s * lines + place
        log_weight = tl.load(
            weight_ptr + at_split, mask=is_part, other=float("-inf"), cache_modifier=".cg"
        )
        average = tl.load(
            partial_ptr + at_split[:, None] * DV + value_dim[None, :],
            mask=is_part[:, None] & (value_dim < DV)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, log_weight)
        origin = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, weight = tl.exp2(best - origin), tl.exp2(log_weight - origin)
        mean = mean * shrink[:, None] + weight[:, None] * average
        total = total * shrink + weight
        best = new_best
    return mean / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_rows", "num_requests", "table_stride"])
def attention_program(
    query_ptr,  # [T, Hkv * G, D]
    key_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    value_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, DV]; None: the keys' first DV columns
    out_ptr,  # [T, Hkv * G, DV]
    partial_ptr,  # [SPLITS, T * Hkv * G, DV] fp32, each split's own average; None without splits
    weight_ptr,  # [SPLITS, T * Hkv * G] fp32, log2 of each split's total weight
    arrived_ptr,  # [tiles * Hkv] int32, zero before and after
    positions_ptr,  # [T]
    valid_ptr,  # [T] bool, or None
    query_start_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    block_tables_ptr,  # [R, M]
    ancestors_ptr,  # [T] int64, or None
    num_rows,
    num_requests,
    table_stride,
    scale,  # of scores in units of log2
    HEADS: tl.constexpr,  # Hkv
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr,  # a request; 0: as many as its rows need
    REQUESTS: tl.constexpr,  # R or more
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # keys of one iteration
    SPLITS: tl.constexpr,
    D_PAD: tl.constexpr,  # of D, or of DV where the values are the keys' columns
    REST_PAD: tl.constexpr,  # of the D - DV columns that are not values there
    DV_PAD: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter's bf16 arithmetic is not to be trusted
    OVERLAP: tl.constexpr,
):
    if OVERLAP:  # what describes the batch was there before the pass began (kernels/chain.py)
        gdc_launch_dependents()
    head = tl.program_id(0)  # first, so that neighbours read neighbouring memory
    tile = tl.program_id(1)
    split = tl.program_id(2)
    SHARED: tl.constexpr = tl.constexpr(value_ptr is None)
    D_FIRST: tl.constexpr = DV if SHARED else D
    if TILES > 0:
        request = (tile // TILES).to(tl.int64)
        local_tile = tile % TILES
    else:
        # request r starts at tile query_start[r] * G // ROWS + r, which leaves it enough of them
        index = tl.arange(0, REQUESTS)
        is_request = index < num_requests
        starts = tl.load(query_start_ptr + index, mask=is_request, other=0)
        first_tile = (starts * G // ROWS).to(tl.int32) + index
        started = is_request & (first_tile <= tile)
        request = tl.sum(started.to(tl.int32), axis=0).to(tl.int64) - 1
        local_tile = tile - tl.max(tl.where(started, first_tile, 0), axis=0)
    start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - start
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    seq_len = tl.minimum(seq_len, table_stride * BLOCK_SIZE)
    end = tl.load(query_start_ptr + num_requests)
    line = local_tile * ROWS + tl.arange(0, ROWS)
    row = start + line // G  # int64 [ROWS]
    is_row = line < num_queries * G
    place = row * (HEADS * G) + head * G + line % G  # among the T * Hq rows of query and out
    position = tl.load(positions_ptr + row, mask=is_row, other=-1).to(tl.int32)
    sees = is_row & (seq_len > 0)
    if valid_ptr is not None:
        sees = sees & (tl.load(valid_ptr + row, mask=is_row, other=0) != 0)
    limit = tl.where(sees, position + 1, 0)  # keys before it are visible
    if ancestors_ptr is not None:
        ancestors = tl.load(ancestors_ptr + row, mask=sees, other=0)
        root = tl.load(positions_ptr + start, mask=num_queries > 0, other=0).to(tl.int32)
        limit = tl.where(ancestors != 0, root, limit)
    # the last row of a request sees all of its keys, and so do the nodes of a tree together
    last = seq_len
    if TILES != 1:
        last = tl.max(limit, axis=0)
        if ancestors_ptr is not None:
            last = tl.where(tl.max((ancestors != 0).to(tl.int32), axis=0) != 0, seq_len, last)
    share = tl.cdiv(last, SPLITS)
    if SPLITS > 1:
        share = tl.maximum(share, MIN_SHARE)
    share = tl.cdiv(share, KEYS) * KEYS
    first_key = split * share
    stop = tl.minimum(first_key + share, last)

    if OVERLAP:  # while the kernels before this one run out, memory fetches what it will read
        for ahead in tl.static_range(PREFETCHED):
            at = first_key + ahead * KEYS + tl.arange(0, KEYS)
            is_key = at < stop
            block = tl.load(
                block_tables_ptr + request * table_stride + at // BLOCK_SIZE, mask=is_key, other=0
            ).to(tl.int64)
            slot = (block * BLOCK_SIZE + at % BLOCK_SIZE) * HEADS + head
            _prefetch(key_ptr + tl.where(is_key, slot, 0) * D, D, D_PAD * (2 if SHARED else 1))
            if not SHARED:
                _prefetch(value_ptr + tl.where(is_key, slot, 0) * DV, DV, DV_PAD)
        gdc_wait()
    value_dim = tl.arange(0, DV_PAD)
    is_value_dim = (value_dim < DV)[None, :]
    if split == 0:  # rows of no request
        for first in range(end * G + tile * ROWS, num_rows * G, tl.num_programs(1) * ROWS):
            spare = (first + tl.arange(0, ROWS)).to(tl.int64)
            spare_place = (spare // G) * (HEADS * G) + head * G + spare % G
            zeros = tl.zeros((ROWS, DV_PAD), out_ptr.dtype.element_ty)
            is_spare = (spare < num_rows * G)[:, None]
            tl.store(
                out_ptr + spare_place[:, None] * DV + value_dim[None, :],
                zeros,
                is_spare & is_value_dim,
            )
    if (last == 0) & (split == 0):
        zeros = tl.zeros((ROWS, DV_PAD), out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + place[:, None] * DV + value_dim[None, :],
            zeros,
            is_row[:, None] & is_value_dim,
        )
    if first_key < last:
        dim = tl.arange(0, D_PAD)
        is_dim = (dim < D_FIRST)[None, :]
        query = tl.load(
            query_ptr + place[:, None] * D + dim[None, :], mask=is_row[:, None] & is_dim, other=0.0
        )
        if UPCAST:
            query = query.to(tl.float32)
        if SHARED:
            rest_dim = tl.arange(0, REST_PAD)
            is_rest = (rest_dim < D - DV)[None, :]
            rest_query = tl.load(
                query_ptr + place[:, None] * D + DV + rest_dim[None, :],
                mask=is_row[:, None] & is_rest,
                other=0.0,
            )
            if UPCAST:
                rest_query = rest_query.to(tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DV_PAD), tl.float32)
        for key_start in range(first_key, stop, KEYS):
            at = key_start + tl.arange(0, KEYS)
            is_key = at < stop
            block = tl.load(
                block_tables_ptr + request * table_stride + at // BLOCK_SIZE, mask=is_key, other=0
            ).to(tl.int64)
            slot = (block * BLOCK_SIZE + at % BLOCK_SIZE) * HEADS + head  # int64 [KEYS]
            key = tl.load(
                key_ptr + slot[:, None] * D + dim[None, :],
                mask=is_key[:, None] & is_dim,
                other=0.0,
            )
            if UPCAST:
                key = key.to(tl.float32)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            if SHARED:
                rest_key = tl.load(
                    key_ptr + slot[:, None] * D + DV + rest_dim[None, :],
                    mask=is_key[:, None] & is_rest,
                    other=0.0,
                )
                if UPCAST:
                    rest_key = rest_key.to(tl.float32)
                scores = tl.dot(rest_query, tl.trans(rest_key), scores, input_precision="ieee")
                value = key
            else:
                value = tl.load(
                    value_ptr + slot[:, None] * DV + value_dim[None, :],
                    mask=is_key[:, None] & is_value_dim,
                    other=0.0,
                )
                if UPCAST:
                    value = value.to(tl.float32)
            visible = at[None, :] < limit[:, None]
            if ancestors_ptr is not None:
                node = at - root  # the row of the step that wrote the key
                is_node = (node >= 0) & (node < 64)
                bits = ancestors[:, None] >> tl.where(is_node, node, 0)[None, :].to(tl.int64)
                visible = visible | (is_node[None, :] & ((bits & 1) != 0))
            scores = tl.where(visible & is_key[None, :], scores * scale, float("-inf"))
            # a whole power of two: what rounding leaves of a weight does not depend on the cut
            new_top = tl.maximum(top, tl.ceil(tl.max(scores, axis=1)))
            origin = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - origin[:, None])
            shrink = tl.exp2(top - origin)
            total = total * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
            top = new_top
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        alone = share >= last
        if alone:
            tl.store(
                out_ptr + place[:, None] * DV + value_dim[None, :],
                out.to(out_ptr.dtype.element_ty),
                mask=is_row[:, None] & is_value_dim,
            )
        if SPLITS > 1 and not alone:
            lines = num_rows.to(tl.int64) * (HEADS * G)
            at_split = split * lines + place
            tl.store(
                partial_ptr + at_split[:, None] * DV + value_dim[None, :],
                out,
                mask=is_row[:, None] & is_value_dim,
            )
            log_weight = top + tl.log2(tl.where(total > 0, total, 1.0))
            tl.store(weight_ptr + at_split, log_weight, mask=is_row)
            tl.debug_barrier()  # every thread's share is written before one thread says so
            arrived = arrived_ptr + tile * HEADS + head
            num_parts = tl.cdiv(last, share)
            if tl.atomic_add(arrived, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrived, 0)
                mean = _average(
                    partial_ptr,
                    weight_ptr,
                    lines,
                    place,
                    is_row,
                    num_parts,
                    DV,
                    SPLITS,
                    ROWS,
                    DV_PAD,
                )
                tl.store(
                    out_ptr + place[:, None] * DV + value_dim[None, :],
                    mean.to(out_ptr.dtype.element_ty),
                    mask=is_row[:, None] & is_value_dim,
                )
