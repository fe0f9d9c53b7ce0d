"""Paged attention in Triton: one program reads a request's keys once for all queries of a key head.

Same results as `reference.paged_attention`; positions stand in for the mask, so nothing of size
queries x keys exists in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.runtime import interpreting


@triton.jit
def _paged_attention(
    query_ptr,  # [T, Hkv * G, D]
    key_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    value_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, DV]
    out_ptr,  # [T, Hkv * G, DV]
    positions_ptr,  # [T]
    query_start_ptr,  # [R + 1]
    block_tables_ptr,  # [R, M]
    table_stride,
    first_request,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # queries times heads of one tile
    KEYS: tl.constexpr,  # keys of one iteration
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter's bf16 arithmetic is not to be trusted
):
    request = first_request + tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - start
    tile = tl.program_id(2) * ROWS
    if tile < num_queries * G:
        line = tile + tl.arange(0, ROWS)
        row = start + line // G  # int64 [ROWS]
        is_row = line < num_queries * G
        position = tl.load(positions_ptr + row, mask=is_row, other=0)
        last = tl.max(position, axis=0)
        out_head = row * (num_heads * G) + head * G + line % G
        dim = tl.arange(0, D_PAD)
        query = tl.load(
            query_ptr + out_head[:, None] * D + dim[None, :],
            mask=is_row[:, None] & (dim < D)[None, :],
            other=0.0,
        )
        value_dim = tl.arange(0, DV_PAD)
        if UPCAST:
            query = query.to(tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DV_PAD), tl.float32)
        for first_key in range(0, last + 1, KEYS):
            at = first_key + tl.arange(0, KEYS)
            is_key = at <= last
            block = tl.load(
                block_tables_ptr + request * table_stride + at // BLOCK_SIZE, mask=is_key, other=0
            )
            slot = (block * BLOCK_SIZE + at % BLOCK_SIZE) * num_heads + head  # int64 [KEYS]
            key = tl.load(
                key_ptr + slot[None, :] * D + dim[:, None],
                mask=is_key[None, :] & (dim < D)[:, None],
                other=0.0,
            )
            value = tl.load(
                value_ptr + slot[:, None] * DV + value_dim[None, :],
                mask=is_key[:, None] & (value_dim < DV)[None, :],
                other=0.0,
            )
            if UPCAST:
                key = key.to(tl.float32)
                value = value.to(tl.float32)
            scores = tl.dot(query, key, input_precision="ieee") * scale
            scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - new_top[:, None])
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            top = new_top
        out = acc / total[:, None]
        tl.store(
            out_ptr + out_head[:, None] * DV + value_dim[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (value_dim < DV)[None, :],
        )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    positions: Tensor,
    query_start: Tensor,
    block_tables: Tensor,
    groups: Sequence[tuple[int, int]],
    scale: float,
) -> Tensor:
    """softmax(scale * q k^T) v over each request's keys up to the query's own position.

    Args:
        query: [T, Hq, D]; query heads h * G .. h * G + G - 1 read key head h.
        key_cache: [num_blocks, block_size, Hkv, D], contiguous.
        value_cache: [num_blocks, block_size, Hkv, Dv], contiguous.
        positions: [T] int64; padding rows hold 0 and attend to position 0.
        query_start: [R + 1] int64.
        block_tables: [R, M] int64, contiguous.
        groups: (requests, longest query) of consecutive requests, on the host; they cover all.

    Returns:
        [T, Hq, Dv] in the query's dtype.
    """
    query = query.contiguous()
    num_rows, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    out = query.new_empty(num_rows, num_heads, value_dim)
    repeats, first = num_heads // num_kv_heads, 0
    for num_requests, max_query in groups:
        lines = max_query * repeats
        rows = max(16, min(64, triton.next_power_of_2(lines)))
        grid = (num_requests, num_kv_heads, triton.cdiv(lines, rows))
        launch: Any = _paged_attention[grid]
        launch(
            query,
            key_cache,
            value_cache,
            out,
            positions,
            query_start,
            block_tables,
            block_tables.stride(0),
            first,
            scale,
            G=repeats,
            D=head_dim,
            DV=value_dim,
            BLOCK_SIZE=block_size,
            ROWS=rows,
            KEYS=64,
            D_PAD=max(16, triton.next_power_of_2(head_dim)),
            DV_PAD=max(16, triton.next_power_of_2(value_dim)),
            UPCAST=interpreting() and query.dtype != torch.float32,
            num_warps=4 if rows > 16 else 2,
            num_stages=3,
        )
        first += num_requests
    return out
