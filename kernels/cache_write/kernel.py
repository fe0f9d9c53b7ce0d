"""Rotation and cache write in Triton: one launch reads the fused product of q, k and v once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.cache_write.reference import HeadNorms
from specdec.kernels.chain import overlapped
from specdec.kernels.runtime import interpreting


@triton.jit
def rounded(x, dtype: tl.constexpr, EXACT: tl.constexpr):
    """fp32 in another type, to nearest even; the interpreter would cut the bits of bf16 off."""
    if EXACT:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _cache_write(
    key_cache_ptr,  # [num_slots, Hkv, D]
    value_cache_ptr,  # [num_slots, Hkv, D]
    qkv_ptr,  # [T, Hq + 2 Hkv, D]
    query_ptr,  # [T, Hq, D]
    cos_ptr,  # [T, D]
    sin_ptr,  # [T, D], negated in the first half
    slots_ptr,  # [T]
    query_norm_ptr,  # [D], or None
    key_norm_ptr,  # [D]
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    D_PAD: tl.constexpr,
    EXACT: tl.constexpr,  # round bf16 by hand
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots_ptr + row)
    dim = tl.arange(0, D_PAD)
    is_dim = (dim < D)[None, :]
    is_query = (head < HQ)[:, None]
    is_key = ((head >= HQ) & (head < HQ + HKV))[:, None]
    is_head = (head < HQ + 2 * HKV)[:, None]
    partner = tl.where(dim < D // 2, dim + D // 2, dim - D // 2)
    heads_ptr = qkv_ptr + (row * (HQ + 2 * HKV) + head)[:, None] * D
    x = tl.load(heads_ptr + dim[None, :], mask=is_head & is_dim, other=0.0)
    turned = (is_query | is_key) & is_dim
    y = tl.load(heads_ptr + partner[None, :], mask=turned, other=0.0)
    cos = tl.load(cos_ptr + row * D + dim, mask=dim < D, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * D + dim, mask=dim < D, other=0.0).to(tl.float32)
    # products round to the model's type where torch's do
    dtype = qkv_ptr.dtype.element_ty
    a, b = x.to(tl.float32), y.to(tl.float32)
    if query_norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(a * a, axis=1) / D + eps)[:, None]
        for_query = tl.load(query_norm_ptr + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        for_key = tl.load(key_norm_ptr + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        a = a * scale * tl.where(is_query, for_query, for_key)
        a = rounded(a, dtype, EXACT).to(tl.float32)
        for_query = tl.load(query_norm_ptr + partner, mask=dim < D, other=0.0)[None, :]
        for_key = tl.load(key_norm_ptr + partner, mask=dim < D, other=0.0)[None, :]
        weight = tl.where(is_query, for_query.to(tl.float32), for_key.to(tl.float32))
        b = rounded(b * scale * weight, dtype, EXACT).to(tl.float32)
    first = rounded(a * cos[None, :], dtype, EXACT).to(tl.float32)
    rotated = rounded(first + b * sin[None, :], dtype, EXACT)
    tl.store(
        query_ptr + (row * HQ + head)[:, None] * D + dim[None, :], rotated, mask=is_query & is_dim
    )
    place = (slot * HKV + head - HQ)[:, None] * D + dim[None, :]
    tl.store(key_cache_ptr + place, rotated, mask=is_key & is_dim)
    is_value = is_head & (head >= HQ + HKV)[:, None]
    tl.store(value_cache_ptr + place - HKV * D, x, mask=is_value & is_dim)


def cache_write_(
    key_cache: Tensor,
    value_cache: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """See `reference.cache_write_`."""
    qkv = qkv.contiguous()
    num_rows, num_all, head_dim = qkv.shape
    num_kv_heads = key_cache.shape[2]
    num_heads = num_all - 2 * num_kv_heads
    query = qkv.new_empty(num_rows, num_heads, head_dim)
    width = triton.next_power_of_2(head_dim)
    heads = max(1, min(8, 1024 // width))
    launch: Any = _cache_write[(num_rows, triton.cdiv(num_all, heads))]
    launch(
        key_cache,
        value_cache,
        qkv,
        query,
        cos,
        sin,
        slot_mapping,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        HEADS=heads,
        D_PAD=width,
        EXACT=interpreting() and qkv.dtype == torch.bfloat16,
        num_warps=4 if heads * width >= 1024 else 1,
        **overlapped(),
    )
    return query
