"""Attention of a batch over paged keys and values: in plain torch, or on the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.cache_write.reference import HeadNorms, split_and_rotate, write_rows_
from specdec.kernels.paged_attention.reference import (
    FoldedGroups,
    fold_groups,
    folded_attention,
)
from specdec.kernels.runtime import uses_triton
from specdec.models.batch import Batch
from specdec.models.layers import Rotary

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
# (query [..., Hq, D], key [..., Hkv, D], value [..., Hkv, Dv]) -> [..., Hq, Dv]


class PagedRows(NamedTuple):
    """What the Triton attention reads of a batch; the same for every layer of a pass."""

    positions: Tensor  # [T]
    query_start: Tensor  # [R + 1]
    seq_lens: Tensor  # [R]
    block_tables: Tensor  # [R, M]
    max_query_len: int
    row_valid: Tensor  # [T]
    ancestor_mask: Tensor | None  # [T]


def attention_rows(
    batch: Batch, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> FoldedGroups | PagedRows:
    """The batch as `attend` wants it, made once for all layers of a pass."""
    if uses_triton():
        return PagedRows(
            batch.positions,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.max_query_len,
            batch.row_valid,
            batch.ancestor_mask,
        )
    return fold_groups(batch.groups, len(batch.input_ids), num_heads, num_kv_heads, dtype)


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    rows: FoldedGroups | PagedRows,
    scale: float,
    value_dim: int | None = None,
) -> Tensor:
    """Attention over what is stored: [T, Hq, D] -> [T, Hq, Dv].

    `rows` from `attention_rows`, which chose between torch and the kernel. Without a value cache
    the values are the keys' first `value_dim` columns.
    """
    if isinstance(rows, FoldedGroups):
        if value_cache is None:
            value_cache = key_cache[..., :value_dim]
        return folded_attention(query, key_cache, value_cache, rows, scale)
    from specdec.kernels.paged_attention.kernel import paged_attention

    settings = rows._asdict()
    return paged_attention(
        query, key_cache, value_cache, scale=scale, value_dim=value_dim, **settings
    )


class PagedAttention(NamedTuple):
    """An `AttentionFn` over the pages of one layer; stores a pass's keys and values first."""

    key_cache: Tensor  # [num_blocks, block_size, Hkv, D]
    value_cache: Tensor | None  # [num_blocks, block_size, Hkv, Dv]; None: see `attend`
    slot_mapping: Tensor  # [T]
    rows: FoldedGroups | PagedRows
    scale: float
    value_dim: int | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[T, Hq, D], [T, Hkv, D], [T, Hkv, Dv] -> [T, Hq, Dv]"""
        keys, values, slots, rows, scale, value_dim = self
        write_rows_(keys, key, slots)
        if values is not None:
            write_rows_(values, value, slots)
        return attend(query, keys, values, rows, scale, value_dim)


def rotate_and_attend(
    attention: AttentionFn,
    qkv: Tensor,
    rotation: Rotary,
    num_heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Query, key and value heads [..., Hq + 2 Hkv, D] -> [..., Hq, D].

    Queries and keys are normed, where there are norms, and rotated. Where the attention is paged
    and runs on the kernels, one launch does that and stores keys and values.
    """
    if isinstance(attention, PagedAttention) and isinstance(attention.rows, PagedRows):
        from specdec.kernels.cache_write.kernel import cache_write_

        keys, values, slots, rows, scale, _ = attention
        query = cache_write_(keys, values, qkv, rotation.cos, rotation.sin, slots, norms)
        return attend(query, keys, values, rows, scale)
    return attention(*split_and_rotate(qkv, rotation.cos, rotation.sin, num_heads, norms))
