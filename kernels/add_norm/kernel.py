"""Norms of rows, one program a row, the row held in registers."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.chain import overlapped


@triton.jit
def _norm_of(x, weight, eps, H: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    """x [BLOCK] fp32, 0 past H."""
    weight = weight.to(tl.float32)
    if ZERO_CENTRED:
        weight += 1.0
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / H + eps) * weight


@triton.jit
def _add_norm(
    hidden_ptr,  # row (r // INNER, r % INNER) at both strides
    residual_ptr,  # [rows, H] at its stride
    weight_ptr,  # [H]
    normed_ptr,  # [rows, H]
    summed_ptr,  # [rows, H]
    hidden_stride,
    inner_stride,
    residual_stride,
    eps,
    H: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    if OVERLAP:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    start = (row // INNER) * hidden_stride + (row % INNER) * inner_stride
    x = tl.load(hidden_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        other = tl.load(residual_ptr + row * residual_stride + at, mask=inside, other=0.0)
        summed = (x + other.to(tl.float32)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + row * H + at, summed, mask=inside)
        x = summed.to(tl.float32)
    normed = _norm_of(x, weight, eps, H, ZERO_CENTRED)
    tl.store(normed_ptr + row * H + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_pair(
    first_ptr,  # [rows, H] at its stride
    second_ptr,  # [rows, H] at its stride
    first_weight_ptr,  # [H]
    second_weight_ptr,  # [H]
    out_ptr,  # [rows, 2 H]
    first_stride,
    second_stride,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < H
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if half == 0:
        x = tl.load(first_ptr + row * first_stride + at, mask=inside, other=0.0)
        weight = tl.load(first_weight_ptr + at, mask=inside, other=0.0)
    else:
        x = tl.load(second_ptr + row * second_stride + at, mask=inside, other=0.0)
        weight = tl.load(second_weight_ptr + at, mask=inside, other=0.0)
    normed = _norm_of(x.to(tl.float32), weight, eps, H, ZERO_CENTRED)
    place = out_ptr + row * (2 * H) + half * H + at
    tl.store(place, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """As `reference.rms_norm`; the rows of x [..., n, H] may lie at any two strides."""
    return _launch(x, None, weight, eps, zero_centred)[0]


def add_norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `reference.add_norm`."""
    return _launch(hidden, residual, weight, eps, zero_centred)


def norm_pair(
    first: Tensor,
    second: Tensor,
    first_weight: Tensor,
    second_weight: Tensor,
    eps: float,
    zero_centred: bool = False,
) -> Tensor:
    """As `reference.norm_pair`."""
    size = first.shape[-1]
    out = first.new_empty(*first.shape[:-1], 2 * size)
    first, second = rows_of(first), rows_of(second)
    if not len(first):
        return out
    block = triton.next_power_of_2(size)
    launch: Any = _norm_pair[(len(first), 2)]
    launch(
        first,
        second,
        first_weight,
        second_weight,
        out,
        first.stride(0),
        second.stride(0),
        eps,
        H=size,
        BLOCK=block,
        ZERO_CENTRED=zero_centred,
        num_warps=_warps(block),
        **overlapped(),
    )
    return out


def rows_of(x: Tensor) -> Tensor:
    """[..., H] as [rows, H] with adjacent columns; a copy only where strides leave no choice."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _launch(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    size = hidden.shape[-1]
    normed = hidden.new_empty(hidden.shape)
    summed, added, inner = hidden, normed, 1
    if hidden.dim() == 3 and residual is None and hidden.stride(-1) == 1:
        rows, inner = hidden, hidden.shape[1]  # heads of a wider row, as they lie
    else:
        rows = rows_of(hidden)
    if residual is not None:
        summed, added = hidden.new_empty(hidden.shape), rows_of(residual)
    if not hidden.numel():
        return normed, summed
    block = triton.next_power_of_2(size)
    launch: Any = _add_norm[(hidden.numel() // size,)]
    launch(
        rows,
        added,
        weight,
        normed,
        summed,
        rows.stride(0),
        rows.stride(1) if inner > 1 else 0,
        added.stride(0),
        eps,
        H=size,
        INNER=inner,
        BLOCK=block,
        ADDS=residual is not None,
        ZERO_CENTRED=zero_centred,
        num_warps=_warps(block),
        **overlapped(),
    )
    return normed, summed


def _warps(block: int) -> int:
    """Enough for one 16-byte load a thread, within reason."""
    return max(1, min(16, block // 256))
