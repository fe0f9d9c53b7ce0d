"""Products of few rows with a large matrix: every weight is read once, at the rate of memory.

Each program streams the rows of its own outputs. Between products memory would stand still while
one kernel runs out and the next fills up, so kernels may overlap (`specdec.kernels.chain`): a
program then asks for its first weights before it waits for the activations that they multiply. How
many it asks for, and whether the next kernel may come in at once or only when the weights of this
one have been read, are figures of a plan, because programs that wait take room and memory's time
from those that work.

Where several programs share an output, each leaves its partial sums and the last to arrive adds
them, always in the same order. Arrivals are counted in memory that every call finds at zero and
leaves at zero; calls on the same device must follow each other, as on one stream.

A plan may swap the operands of the tensor cores' products. From 64 outputs and four warps on these
are `wgmma`, which reads both operands from shared memory and whose second may be as narrow as 8:
with the matrix first and the few rows second, no weight of 16 bits passes through registers.
Smaller ones (`mma`) divide the first operand among warps, so that no two take the same weight where
each has 16 outputs or more.

Weights may be bytes: e4m3 values, exact in bf16, become so in registers, and what a block of them
adds to a sum takes the block's scale in fp32.

A product may end in what follows it in a decoder layer, which then needs no launch of its own: the
gated activation, or the residual sum and its norm. A program does not see a whole row of that sum,
so each leaves the sum of its own squares, and the products that read the norm divide (`Normed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from specdec.kernels.add_norm.kernel import rows_of
from specdec.kernels.chain import overlapped
from specdec.kernels.few_rows.plan import Plan, plan_for
from specdec.kernels.few_rows.program import few_rows_program
from specdec.kernels.few_rows.reference import SCALED, Fp8Weight, Normed, rows_in
from specdec.kernels.runtime import interpreting

SQUARES_HELD = 64  # of them a thread, while it multiplies
MAX_TILES = 1 << 16  # groups of outputs that programs can share
FALLBACK = Plan(cols=32, step=64, split=1, warps=4, stages=3)


def few_rows(
    x: Tensor | Normed,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """As `reference.few_rows`, for up to 128 rows.

    Args:
        x: [..., K]; rows may lie at any stride.
        weight: [N, K] contiguous, of x's dtype or fp8; it begins at a multiple of 16 bytes.
        plan: None takes `plan_for`'s.
    """
    rows, num_cols = rows_in(x), weight.shape[0]
    out = rows.new_empty(*rows.shape[:-1], num_cols)
    _launch(x, weight, bias, out, num_cols, plan or plan_for(rows, weight) or FALLBACK)
    return out


def few_rows_gated(
    x: Tensor | Normed,
    gate_up: Tensor | Fp8Weight,
    bias: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """As `reference.few_rows_gated`, for up to 128 rows."""
    rows, num_cols = rows_in(x), gate_up.shape[0] // 2
    out = rows.new_empty(*rows.shape[:-1], num_cols)
    plan = plan or plan_for(rows, gate_up, gated=True) or FALLBACK
    _launch(x, gate_up, bias, out, num_cols, plan, gated=True)
    return out


def few_rows_add_norm(
    x: Tensor | Normed,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    plan: Plan | None = None,
) -> tuple[Normed, Tensor]:
    """As `reference.few_rows_add_norm`, for up to 128 rows; residual and norm contiguous.

    Its squares are [T, n], one number of each of the n groups of outputs that a program has.
    """
    rows, num_cols = rows_in(x), weight.shape[0]
    plan = plan or plan_for(rows, weight) or FALLBACK
    out, summed = torch.empty_like(residual), torch.empty_like(residual)
    tiles, num_rows = triton.cdiv(num_cols, plan.cols), residual.numel() // num_cols
    sums = residual.new_empty((num_rows, tiles), dtype=torch.float32)
    stream = {"residual_ptr": residual, "norm_ptr": norm, "summed_ptr": summed, "sums_ptr": sums}
    _launch(x, weight, bias, out, num_cols, plan, stream=stream)
    return Normed(out, sums, eps), summed


def _launch(
    x: Tensor | Normed,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None,
    out: Tensor,
    num_cols: int,  # outputs
    plan: Plan,
    *,
    gated: bool = False,
    stream: Mapping[str, Tensor] | None = None,  # residual_ptr, norm_ptr, summed_ptr and sums_ptr
) -> None:
    rows = rows_of(rows_in(x))
    num_rows, width = rows.shape
    if not num_rows:
        return
    tiles = triton.cdiv(num_cols, plan.cols)
    partial = arrived = None
    if plan.split > 1:
        slabs = plan.split * (2 if gated else 1)
        partial = out.new_empty((slabs, num_rows, num_cols), dtype=torch.float32)
        arrived = _arrivals(out.device)
    squares, eps, num_squares = None, 0.0, 1
    if isinstance(x, Normed):
        squares, eps, num_squares = x.squares, x.eps, x.squares.shape[1]
    scale = None
    if isinstance(weight, Fp8Weight):
        weight, scale = weight.data.view(torch.uint8), weight.scale
        # a step has one scale; bytes are not asked for ahead, nor held
        plan = plan._replace(step=min(plan.step, SCALED), ahead=0, held=0)
    low = interpreting() and rows.dtype != torch.float32
    num_lines = max(16, triton.next_power_of_2(num_rows))
    arguments = {
        "squares_ptr": squares,
        "eps": eps,
        **(stream or dict.fromkeys(("residual_ptr", "norm_ptr", "summed_ptr", "sums_ptr"))),
        "num_rows": num_rows,
        "X_STRIDE": rows.stride(0),
        "N": num_cols,
        "K": width,
        "ROWS": num_lines,
        "COLS": plan.cols,
        "BLOCK": triton.next_power_of_2(plan.cols),
        "STEP": plan.step,
        "SPLIT": plan.split,
        "AHEAD": plan.ahead,
        "HELD": plan.held if plan.held * plan.step * plan.split <= width else 0,
        "LATE": plan.late,
        "GATED": gated,
        "SWAP_AB": plan.swap_ab,
        "SQUARES": num_squares,
        "SQUARES_FIRST": num_lines * num_squares <= SQUARES_HELD * 32 * plan.warps,
        "SCALED": SCALED,
        "UPCAST": low,
        "COMPILED": not interpreting(),
        "EXACT": low and rows.dtype == torch.bfloat16,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
        **(overlapped() if plan.overlap else {"OVERLAP": False}),
    }
    launch: Any = few_rows_program[(tiles, plan.split)]
    launch(rows, weight, scale, bias, out, partial, arrived, **arguments)


@cache
def _arrivals(device: torch.device) -> Tensor:
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
