"""The gated norm after the recurrence, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_norm_kernel(
    x_ptr,  # [T, HEADS, D]
    gate_ptr,  # [T, HEADS, D] of any row stride
    weight_ptr,  # [D]
    out_ptr,  # [T, HEADS, D]
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HEADS_PAD: tl.constexpr,  # heads of a program
    D_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PAD + tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, D_PAD)[None, :]
    mask = (head < HEADS) & (dim < D)
    at = head * D + dim
    x = tl.load(x_ptr + row * (HEADS * D) + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dim, mask=dim < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    out = x * scale * weight * (gate / (1 + tl.exp(-gate)))
    tl.store(out_ptr + row * (HEADS * D) + at, out.to(out_ptr.dtype.element_ty), mask=mask)
