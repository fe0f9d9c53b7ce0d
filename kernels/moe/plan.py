"""When experts run on the kernel, and how their products are cut."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_CHOICES = 512  # rows times experts a row; every program looks through all of them
FULL = 264  # programs that keep the memory of a large GPU busy


class ExpertPlan(NamedTuple):
    rows: int  # choices of one expert that are multiplied at once
    cols: int  # outputs of a program (gated: of each half)
    step: int  # of the summed dimension, in one iteration
    warps: int
    stages: int


def expert_plan(
    choices: int, num_experts: int, num_cols: int, width: int, *, gated: bool
) -> ExpertPlan:
    """How `choices` rows of [width] go through experts with `num_cols` outputs."""
    slots = min(choices, num_experts)
    rows = 16 if choices <= 8 * num_experts else 32 if choices <= 16 * num_experts else 64
    step = 128 if width % 128 == 0 else 64
    if slots * num_cols < FULL * 32:
        return ExpertPlan(rows, 16, step, warps=2, stages=4)
    return ExpertPlan(rows, 32, step, warps=4, stages=3 if gated else 4)


def takes(hidden: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor) -> bool:
    """Whether the kernel is for these: few choices, 16-bit contiguous experts."""
    kinds = {hidden.dtype, gate_up.dtype, down.dtype}
    return (
        experts.numel() <= MAX_CHOICES
        and kinds in ({torch.bfloat16}, {torch.float16})
        and all(tensor.is_contiguous() for tensor in (hidden, gate_up, down, experts))
    )
