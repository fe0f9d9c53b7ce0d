"""Paged attention in Triton: one program reads keys once for all query rows and heads of a tile.

A tile is up to ROWS lines of one request and one key head, a line being one query row and one of
the G query heads that share the key head. Same results as `reference.paged_attention`; positions,
or bit masks of tree ancestors, stand in for the mask, so nothing of size queries x keys exists in
memory. Where there are fewer tiles than processors, SPLITS programs share a tile's keys
(arXiv 2311.01282, section 3) and the last of them to finish adds up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.chain import overlapped
from specdec.kernels.runtime import interpreting

LOG2_E = 1.4426950408889634
MAX_SPLITS = 32


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
    part = tl.arange(0, SPLITS)
    logs = tl.load(
        weight_ptr + part[None, :] * lines + place[:, None],
        mask=is_row[:, None] & (part < num_parts)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    best = tl.max(logs, axis=1)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp2(logs - best[:, None]), axis=1)
    value_dim = tl.arange(0, DV_PAD)
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
        mean += tl.exp2(log_weight - best)[:, None] * average
    return mean / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_rows", "num_requests", "table_stride"])
def _paged_attention(
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
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    SHARED: tl.constexpr = value_ptr is None
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
    share = tl.cdiv(tl.cdiv(last, SPLITS), KEYS) * KEYS
    first_key = split * share
    stop = tl.minimum(first_key + share, last)

    if OVERLAP:
        gdc_wait()
    value_dim = tl.arange(0, DV_PAD)
    is_value_dim = (value_dim < DV)[None, :]
    if split == 0:  # rows of no request
        for first in range(end * G + tile * ROWS, num_rows * G, tl.num_programs(0) * ROWS):
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
            new_top = tl.maximum(top, tl.max(scores, axis=1))
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


class Launch(NamedTuple):
    """How one call is cut; host arithmetic on shapes alone."""

    tiles: int
    tiles_per_request: int  # 0: as many as its rows need
    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int


def plan_launch(
    num_rows: int,
    num_requests: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    value_dim: int,
    max_keys: int,
    itemsize: int,
    num_processors: int,
) -> Launch:
    """Tiles, splits and pipeline of a call.

    Args:
        max_query_len: most rows of a request.
        max_keys: most keys of a request, M * block_size.
        itemsize: bytes of a number in the cache.
    """
    repeats = num_heads // num_kv_heads
    lines = min(max_query_len, num_rows) * repeats
    wide = value_dim > 128 or itemsize > 2
    rows = max(16, min(32 if wide else 64, triton.next_power_of_2(lines)))
    keys = 32 if rows == 16 or wide else 64
    each = triton.cdiv(lines, rows)
    tiles, ragged = num_requests * each, num_rows * repeats // rows + num_requests
    if ragged < tiles:
        tiles, each = ragged, 0
    splits = min(num_processors // (tiles * num_kv_heads), triton.cdiv(max_keys, keys), MAX_SPLITS)
    splits = 1 << (max(splits, 1).bit_length() - 1)
    warps = 4 if rows * value_dim <= 64 * 128 else 8
    # block ids are fetched two stages before the keys that they place
    return Launch(tiles, each, rows, keys, splits, warps, 2 if wide else 5)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    *,
    positions: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    scale: float,
    row_valid: Tensor | None = None,
    ancestor_mask: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v over each request's keys up to the query's own position.

    One launch serves any mix of rows; nothing is read on the host, and the launch depends on shapes
    only. A cache is read at no position past the last that a row of the tile may see.

    Args:
        query: [T, Hq, D]; query heads h * G .. h * G + G - 1 read key head h.
        key_cache: [num_blocks, block_size, Hkv, D], contiguous.
        value_cache: [num_blocks, block_size, Hkv, Dv], contiguous; None: the values are the first
            `value_dim` columns of the keys, which are then read once for both.
        positions: [T] int64.
        query_start: [R + 1] int64; rows past query_start[R] belong to no request.
        seq_lens: [R] int64, keys that the request's last row sees; 0 where there is no request.
        block_tables: [R, M] int64, contiguous.
        max_query_len: most rows of a request, an upper bound.
        row_valid: [T] bool, False on padding rows.
        ancestor_mask: [T] int64, for rows of a tree. Row i of the request wrote its key at index
            p + i, where p is the position of the request's first row; bit i set: that key is
            visible, as is every key before p. 0: the row sees keys up to its own position.

    Returns:
        [T, Hq, Dv] in the query's dtype; 0 on rows that are padding or of no request, or whose
        request has no keys.
    """
    query = query.contiguous()
    num_rows, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    width = value_cache.shape[-1] if value_cache is not None else value_dim
    if width is None:
        raise ValueError("value_cache is None; name the values' columns of the keys in value_dim")
    shared = value_cache is None
    num_requests, max_blocks = block_tables.shape
    launch = plan_launch(
        num_rows,
        num_requests,
        max_query_len,
        num_heads,
        num_kv_heads,
        width,
        max_blocks * block_size,
        query.element_size(),
        _num_processors(query.device),
    )
    out = query.new_empty(num_rows, num_heads, width)
    partial = weight = arrived = None
    if launch.splits > 1:
        lines = num_rows * num_heads
        partial = query.new_empty(launch.splits, lines, width, dtype=torch.float32)
        weight = query.new_empty(launch.splits, lines, dtype=torch.float32)
        arrived = _arrived(query.device)
    start: Any = _paged_attention[(launch.tiles, num_kv_heads, launch.splits)]
    start(
        query,
        key_cache,
        value_cache,
        out,
        partial,
        weight,
        arrived,
        positions,
        row_valid,
        query_start,
        seq_lens,
        block_tables,
        ancestor_mask,
        num_rows,
        num_requests,
        block_tables.stride(0),
        scale * LOG2_E,
        HEADS=num_kv_heads,
        G=num_heads // num_kv_heads,
        D=head_dim,
        DV=width,
        BLOCK_SIZE=block_size,
        TILES=launch.tiles_per_request,
        REQUESTS=1 if launch.tiles_per_request else triton.next_power_of_2(num_requests),
        ROWS=launch.rows,
        KEYS=launch.keys,
        SPLITS=launch.splits,
        D_PAD=max(16, triton.next_power_of_2(width if shared else head_dim)),
        REST_PAD=max(16, triton.next_power_of_2(head_dim - width)) if shared else 1,
        DV_PAD=max(16, triton.next_power_of_2(width)),
        UPCAST=interpreting() and query.dtype != torch.float32,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **overlapped(),
    )
    return out


@lru_cache
def _num_processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132  # the interpreter splits as an H200 does


@lru_cache
def _arrived(device: torch.device) -> Tensor:
    """Counters for `arrived_ptr`: calls on one stream follow each other and leave zeros, so they
    share them. Only calls with fewer tiles than processors count."""
    return torch.zeros(1024, dtype=torch.int32, device=device)
