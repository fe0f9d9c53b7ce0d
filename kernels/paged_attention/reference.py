"""Attention of ragged queries over paged keys and values, in plain torch: the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionGroup(NamedTuple):
    """Requests of similar query length, padded to a rectangle for the torch attention."""

    query_index: Tensor  # [g, q] batch row of each query; padding repeats the request's first row
    block_tables: Tensor  # [g, m] blocks that cover the longest sequence of the group
    mask: Tensor  # [g, q, m * block_size] True where a key is visible; never an all-False row


class FoldedGroup(NamedTuple):
    """A group with the query heads of one key head folded into query rows (G a key head)."""

    query_rows: Tensor  # [g * Hkv * G * q] rows of query.view(T * Hq, D)
    blocks: Tensor  # [g * m] block ids
    bias: Tensor  # [g, 1, G * q, m * block_size] 0 where visible, else -inf, in the query's dtype


class FoldedGroups(NamedTuple):
    """What every layer of a pass shares; made once by `fold_groups`."""

    groups: tuple[FoldedGroup, ...]
    output_rows: Tensor  # [T * Hq] where each (row, head) stands in the groups' outputs, in order


def fold_groups(
    groups: Sequence[AttentionGroup],
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> FoldedGroups:
    """Index arithmetic for `folded_attention` over T = num_rows query rows.

    Padding entries of a group's `query_index` repeat a row together with its mask; the first
    occurrence is read back.
    """
    repeats = num_heads // num_kv_heads
    device = groups[0].query_index.device
    heads = torch.arange(num_heads, device=device).view(1, num_kv_heads, repeats, 1)
    folded, places = [], []
    for group in groups:
        rows = group.query_index[:, None, None, :] * num_heads + heads  # [g, Hkv, G, q]
        places.append(rows.flatten())
        visible = group.mask[:, None, None].expand(-1, -1, repeats, -1, -1)
        bias = torch.zeros(visible.shape, dtype=dtype, device=device)
        bias = bias.masked_fill_(~visible, float("-inf")).flatten(2, 3)
        folded.append(FoldedGroup(places[-1], group.block_tables.flatten(), bias))
    place = torch.cat(places) if len(places) > 1 else places[0]
    order = torch.arange(place.numel(), device=device)
    output_rows = torch.zeros(num_rows * num_heads, dtype=torch.int64, device=device)
    output_rows.scatter_reduce_(0, place, order, "amin", include_self=False)
    return FoldedGroups(tuple(folded), output_rows)


def folded_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, folded: FoldedGroups, scale: float
) -> Tensor:
    """`paged_attention` over groups that are folded already."""
    num_rows, num_heads, head_dim = query.shape
    flat_query = query.reshape(num_rows * num_heads, head_dim)
    outputs = []
    for query_rows, blocks, bias in folded.groups:
        num_requests, _, num_queries, num_keys = bias.shape
        q = flat_query.index_select(0, query_rows).view(num_requests, -1, num_queries, head_dim)
        k, v = (
            cache.index_select(0, blocks)
            .view(num_requests, num_keys, *cache.shape[2:])
            .transpose(1, 2)
            for cache in (key_cache, value_cache)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        outputs.append(out.reshape(-1, out.shape[-1]))
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return out.index_select(0, folded.output_rows).view(num_rows, num_heads, -1)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    groups: Sequence[AttentionGroup],
    scale: float,
) -> Tensor:
    """softmax(scale * q k^T) v for every query row over the keys that its group's mask shows.

    Query heads h * G .. h * G + G - 1 read key head h.

    Args:
        query: [T, Hq, D].
        key_cache: [num_blocks, block_size, Hkv, D].
        value_cache: [num_blocks, block_size, Hkv, Dv].
        groups: rectangles of requests; every row of the batch is in exactly one request.

    Returns:
        [T, Hq, Dv] in the query's dtype.
    """
    num_rows, num_heads, _ = query.shape
    folded = fold_groups(groups, num_rows, num_heads, key_cache.shape[2], query.dtype)
    return folded_attention(query, key_cache, value_cache, folded, scale)
