"""Mixture of experts for few rows: each chosen expert's weights are read once.

Nothing is sorted. A program belongs to one expert and to some of its outputs, looks through all
choices for the rows that are its expert's, and streams the weights against them. There is a program
for each choice, of which only an expert's first does the work, or for each expert where there are
fewer experts than choices.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.chain import overlapped
from specdec.kernels.gated_act.kernel import silu_times
from specdec.kernels.moe.choice import grouped_sigmoid_topk, softmax_topk
from specdec.kernels.moe.plan import expert_plan
from specdec.kernels.runtime import interpreting

SUM_BLOCK = 512

__all__ = ["grouped_sigmoid_topk", "moe", "softmax_topk"]


@triton.jit
def _expert_products(
    x_ptr,  # [choices // SHARE, K]
    weight_ptr,  # [E, N, K]; gated [E, 2 N, K]
    experts_ptr,  # [choices] int64
    out_ptr,  # [choices, N]
    choices,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,  # choices of one row of x
    PAD: tl.constexpr,  # at least the number of choices
    BY_EXPERT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    GATED: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    slot = tl.program_id(0)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    k = tl.arange(0, STEP)
    lane = tl.arange(0, ROWS)
    choice = tl.arange(0, PAD)
    is_even: tl.constexpr = K % STEP == 0
    dtype = out_ptr.dtype.element_ty
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    chosen = tl.load(experts_ptr + choice, mask=choice < choices, other=-1)
    expert = slot.to(tl.int64)
    if not BY_EXPERT:
        expert = tl.load(experts_ptr + slot)
    is_mine = chosen == expert
    count = tl.sum(is_mine.to(tl.int32), axis=0)
    if not BY_EXPERT:  # a later choice of an expert leaves it to the first
        count = tl.where(tl.min(tl.where(is_mine, choice, PAD), axis=0) == slot, count, 0)
    rank = tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
    first_row = expert * N
    if GATED:
        first_row = first_row * 2
    # outputs past the last repeat its row, and are not stored
    weight_rows = weight_ptr + (first_row + tl.minimum(col, N - 1)) * K
    for begin in range(0, count, ROWS):
        is_row = begin + lane < count
        is_picked = is_mine[None, :] & (rank[None, :] == (begin + lane)[:, None])
        picked = tl.sum(tl.where(is_picked, choice[None, :], 0), axis=1)
        x_rows = x_ptr + (picked // SHARE).to(tl.int64) * K
        gate = tl.zeros((ROWS, COLS), tl.float32)
        up = tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, K, STEP):
            at = first + k
            if is_even:
                x = tl.load(x_rows[:, None] + at[None, :], mask=is_row[:, None], other=0.0)
                weight = tl.load(weight_rows[None, :] + at[:, None])
                if GATED:
                    other = tl.load(weight_rows[None, :] + N * K + at[:, None])
            else:
                inside = at < K
                x_mask = is_row[:, None] & inside[None, :]
                x = tl.load(x_rows[:, None] + at[None, :], mask=x_mask, other=0.0)
                place = weight_rows[None, :] + at[:, None]
                weight = tl.load(place, mask=inside[:, None], other=0.0)
                if GATED:
                    other = tl.load(place + N * K, mask=inside[:, None], other=0.0)
            if UPCAST:
                x = x.to(tl.float32)
                weight = weight.to(tl.float32)
                if GATED:
                    other = other.to(tl.float32)
            gate = tl.dot(x, weight, gate, input_precision="ieee")
            if GATED:
                up = tl.dot(x, other, up, input_precision="ieee")
        out = gate
        if GATED:
            out = silu_times(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
        tl.store(
            out_ptr + picked.to(tl.int64)[:, None] * N + col[None, :],
            out.to(dtype),
            mask=is_row[:, None] & (col < N)[None, :],
        )


@triton.jit
def _weighted_sum(
    outputs_ptr,  # [M, TOP_K, H]
    weights_ptr,  # [M, TOP_K] fp32
    shared_ptr,  # [M, H], or None
    gate_ptr,  # [M], or None
    out_ptr,  # [M, H]
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + row * TOP_K + choice)
        place = outputs_ptr + (row * TOP_K + choice) * H + at
        total += weight * tl.load(place, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if shared_ptr is not None:  # rounded where the single ops round
        shared = tl.load(shared_ptr + row * H + at, mask=inside, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            gate = 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + row).to(tl.float32)))
            shared = (shared * gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + shared
    tl.store(out_ptr + row * H + at, total.to(dtype), mask=inside)


def moe(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """As `reference.moe`, for few rows (`plan.takes`); all inputs contiguous."""
    num_rows, top_k = experts.shape
    num_experts, size, inner_size = down.shape
    out = torch.empty_like(hidden)
    if not num_rows:
        return out
    inner = hidden.new_empty(num_rows * top_k, inner_size)
    _products(hidden, gate_up, experts, inner, num_experts, share=top_k, gated=True)
    outputs = hidden.new_empty(num_rows * top_k, size)
    _products(inner, down, experts, outputs, num_experts, share=1, gated=False)
    launch: Any = _weighted_sum[(num_rows, triton.cdiv(size, SUM_BLOCK))]
    launch(
        outputs,
        weights,
        shared,
        shared_gate,
        out,
        H=size,
        TOP_K=top_k,
        BLOCK=SUM_BLOCK,
        num_warps=2,
        **overlapped(),
    )
    return out


def _products(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    out: Tensor,
    num_experts: int,
    *,
    share: int,
    gated: bool,
) -> None:
    choices, num_cols = out.shape
    slots = min(choices, num_experts)
    plan = expert_plan(choices, num_experts, num_cols, x.shape[1], gated=gated)
    launch: Any = _expert_products[(slots, triton.cdiv(num_cols, plan.cols))]
    launch(
        x,
        weight,
        experts,
        out,
        choices,
        N=num_cols,
        K=x.shape[1],
        SHARE=share,
        PAD=max(16, triton.next_power_of_2(choices)),
        BY_EXPERT=num_experts <= choices,
        ROWS=plan.rows,
        COLS=plan.cols,
        STEP=plan.step,
        GATED=gated,
        UPCAST=interpreting() and x.dtype != torch.float32,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **overlapped(),
    )
