"""Tables of rotary positions in Triton, in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _rotary(
    freq_ptr,  # [HALF] fp32
    positions_ptr,  # [T]
    cos_ptr,  # [T, 2 HALF]
    sin_ptr,  # [T, 2 HALF]
    num_rows,
    scale,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, HALF_PAD)
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(freq_ptr + dim, mask=dim < HALF, other=0.0)[None, :]
    cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
    place = row[:, None] * (2 * HALF) + dim[None, :]
    inside = (row < num_rows)[:, None] & (dim < HALF)[None, :]
    dtype = cos_ptr.dtype.element_ty
    tl.store(cos_ptr + place, cos.to(dtype), mask=inside)
    tl.store(cos_ptr + place + HALF, cos.to(dtype), mask=inside)
    tl.store(sin_ptr + place, (-sin).to(dtype), mask=inside)
    tl.store(sin_ptr + place + HALF, sin.to(dtype), mask=inside)


def rotary_tables(
    inv_freq: Tensor, positions: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See `reference.rotary_tables`; positions contiguous."""
    half, num_rows = len(inv_freq), positions.numel()
    cos, sin = (
        torch.empty(*positions.shape, 1, 2 * half, dtype=dtype, device=positions.device)
        for _ in range(2)
    )
    rows = 4
    launch: Any = _rotary[(triton.cdiv(num_rows, rows),)]
    launch(
        inv_freq,
        positions,
        cos,
        sin,
        num_rows,
        scale,
        HALF=half,
        ROWS=rows,
        HALF_PAD=triton.next_power_of_2(half),
        num_warps=2,
    )
    return cos, sin
