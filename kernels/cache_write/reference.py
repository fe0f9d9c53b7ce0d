"""Rotation of queries and keys and the write of keys and values into the paged cache: plain torch.

The definition; `HeadNorms` are the norms that some families put on every head before it is rotated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class HeadNorms(NamedTuple):
    """RMS norms of each query and key head, before rotation."""

    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads [..., heads, D] by tables [..., 1, D], `sin` negated in its first half;
    dimension i pairs with i + D / 2."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, dims=-1), sin)


def split_and_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads [..., Hq + 2 Hkv, D] as query, key and value, the first two normed and rotated."""
    num_kv_heads = (qkv.shape[-2] - num_heads) // 2
    if norms is None:
        rotated = rotate(qkv[..., : num_heads + num_kv_heads, :], cos, sin)
        query, key = rotated.split((num_heads, num_kv_heads), dim=-2)
        return query, key, qkv[..., num_heads + num_kv_heads :, :]
    query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    query = F.rms_norm(query, norms.query.shape, norms.query, norms.eps)
    key = F.rms_norm(key, norms.key.shape, norms.key, norms.eps)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def write_rows_(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Stores rows [T, Hkv, D] at flat slots [T] of a cache [num_blocks, block_size, Hkv, D]."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, rows)


def cache_write_(
    key_cache: Tensor,
    value_cache: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Stores a pass's rotated keys and its values; returns the rotated query.

    Args:
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], contiguous.
        qkv: [T, Hq + 2 Hkv, D], contiguous: query heads, key heads, value heads.
        cos, sin: [T, 1, D] in qkv's dtype, contiguous, `sin` negated in its first half.
        slot_mapping: [T] int64 flat slots; where rows share one, any of them stays.

    Returns:
        [T, Hq, D].
    """
    num_heads = qkv.shape[1] - 2 * key_cache.shape[2]
    query, key, value = split_and_rotate(qkv, cos, sin, num_heads, norms)
    write_rows_(key_cache, key, slot_mapping)
    write_rows_(value_cache, value, slot_mapping)
    return query
