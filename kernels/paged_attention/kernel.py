"""Paged attention in Triton: keys are read once for all query rows and heads of a tile.

Same results as `reference.paged_attention`; positions, or bit masks of tree ancestors, stand in for
the mask, so nothing of size queries x keys exists in memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from specdec.kernels.chain import overlapped
from specdec.kernels.paged_attention.plan import Plan, plan_for
from specdec.kernels.paged_attention.program import attention_program
from specdec.kernels.runtime import interpreting

LOG2_E = 1.4426950408889634


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
    plan: Plan | None = None,
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
        plan: how to cut the call; chosen by shape where it is None.
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
    plan = plan or plan_for(
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
    if plan.splits > 1:
        lines = num_rows * num_heads
        partial = query.new_empty(plan.splits, lines, width, dtype=torch.float32)
        weight = query.new_empty(plan.splits, lines, dtype=torch.float32)
        arrived = _arrived(query.device)
    start: Any = attention_program[(num_kv_heads, plan.tiles, plan.splits)]
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
        TILES=plan.tiles_per_request,
        REQUESTS=1 if plan.tiles_per_request else triton.next_power_of_2(num_requests),
        ROWS=plan.rows,
        KEYS=plan.keys,
        SPLITS=plan.splits,
        D_PAD=max(16, triton.next_power_of_2(width if shared else head_dim)),
        REST_PAD=max(16, triton.next_power_of_2(head_dim - width)) if shared else 1,
        DV_PAD=max(16, triton.next_power_of_2(width)),
        UPCAST=interpreting() and query.dtype != torch.float32,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
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
