"""Few rows times an fp8 matrix: the weights are read once, at a byte each.

e4m3 values are exact in bf16, so a tile is multiplied as it is and each block's sum takes its scale
in fp32. A program's outputs lie in one row of blocks and a step of its loop in one column, so that
a tile has one scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.fp8_linear.reference import BLOCK
from specdec.kernels.runtime import interpreting


@triton.jit
def _fp8_linear(
    x_ptr,  # [num_rows, K]
    weight_ptr,  # [N, K] e4m3
    scale_ptr,  # [ceil(N / BLOCK), ceil(K / BLOCK)] fp32
    bias_ptr,  # [N]
    out_ptr,  # [num_rows, N]
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,  # divides BLOCK
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    is_row = row < num_rows
    # outputs past the last repeat its row, and are not stored
    weight_rows = weight_ptr + tl.minimum(col, N - 1).to(tl.int64) * K
    x_rows = x_ptr + row.to(tl.int64) * K
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    scales = scale_ptr + (tl.program_id(0) * COLS // BLOCK) * blocks
    total = tl.zeros((ROWS, COLS), tl.float32)
    for block in range(blocks):
        at = block * BLOCK + k
        if K % BLOCK == 0:
            x = tl.load(x_rows[:, None] + at[None, :], mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_rows[None, :] + at[:, None])
        else:
            inside = at < K
            x_mask = is_row[:, None] & inside[None, :]
            x = tl.load(x_rows[:, None] + at[None, :], mask=x_mask, other=0.0)
            weight = tl.load(weight_rows[None, :] + at[:, None], mask=inside[:, None], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
        part = tl.dot(x, weight.to(x.dtype), input_precision="ieee")
        total += part * tl.load(scales + block)
    if BIASED:
        total += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * N + col[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (col < N)[None, :],
    )


class Tiles(NamedTuple):
    rows: int
    cols: int
    stages: int


def tiles_for(num_rows: int, num_outputs: int) -> Tiles:
    """Programs enough to fill the chip twice, and stages enough for some 30 KB on their way to each
    multiprocessor."""
    rows = max(16, min(64, triton.next_power_of_2(num_rows)))
    cols = 64 if num_outputs >= 16384 else 32 if num_outputs >= 8192 else 16
    return Tiles(rows, cols, 4 if rows > 16 else {16: 10, 32: 8, 64: 6}[cols])


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `reference.fp8_linear`, for contiguous tensors."""
    x = x.contiguous()
    num_rows, size = x.shape
    num_outputs = weight.shape[0]
    out = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return out
    rows, cols, stages = tiles_for(num_rows, num_outputs)
    grid = (triton.cdiv(num_outputs, cols), triton.cdiv(num_rows, rows))
    launch: Any = _fp8_linear[grid]
    launch(
        x,
        weight,
        scale,
        x if bias is None else bias,
        out,
        num_rows,
        N=num_outputs,
        K=size,
        ROWS=rows,
        COLS=cols,
        BLOCK=BLOCK,
        BIASED=bias is not None,
        UPCAST=interpreting() or x.dtype == torch.float32,
        num_warps=4,
        num_stages=stages,
    )
    return out
