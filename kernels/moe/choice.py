"""The choice of experts, one program a row; of equal scores the lower id is taken.

A row that is not finite chooses experts that exist, with weights of NaN: it spoils itself alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.chain import overlapped

LOWEST = tl.constexpr(-1e30)  # below every score, and finite when two of them are added


@triton.jit
def _rankable(scores, inside):
    """Scores in which NaN comes last but before what is not inside."""
    return tl.where(inside, tl.where(scores == scores, scores, LOWEST), float("-inf"))


@triton.jit
def _best(ranked, values, index, COUNT: tl.constexpr, PAD: tl.constexpr, COUNT_PAD: tl.constexpr):
    """Where the COUNT largest of `ranked` [PAD] are, and `values` there, by falling rank."""
    place = tl.arange(0, COUNT_PAD)
    chosen = tl.zeros((COUNT_PAD,), tl.int32)
    found = tl.zeros((COUNT_PAD,), tl.float32)
    for choice in tl.static_range(COUNT):
        at = tl.min(tl.where(ranked == tl.max(ranked, axis=0), index, PAD), axis=0)
        value = tl.sum(tl.where(index == at, values, 0.0), axis=0)
        chosen = tl.where(place == choice, at, chosen)
        found = tl.where(place == choice, value, found)
        ranked = tl.where(index == at, float("-inf"), ranked)
    return chosen, found


@triton.jit
def _store_choice(
    experts_ptr, weights_ptr, row, experts, weights, TOP_K: tl.constexpr, K_PAD: tl.constexpr
):
    place = tl.arange(0, K_PAD)
    is_choice = place < TOP_K
    tl.store(experts_ptr + row * TOP_K + place, experts.to(tl.int64), mask=is_choice)
    tl.store(weights_ptr + row * TOP_K + place, weights, mask=is_choice)


@triton.jit
def _softmax_topk(
    logits_ptr,  # [M, E]
    experts_ptr,  # [M, TOP_K] int64
    weights_ptr,  # [M, TOP_K] fp32
    scores_ptr,  # [M, E] fp32
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    NORMALISE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_PAD)
    inside = expert < E
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.load(logits_ptr + row * E + expert, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    raised = tl.exp(logits - tl.max(logits, axis=0))
    scores = raised / tl.sum(raised, axis=0)
    tl.store(scores_ptr + row * E + expert, scores, mask=inside)
    experts, weights = _best(_rankable(scores, inside), scores, expert, TOP_K, E_PAD, K_PAD)
    if NORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    _store_choice(experts_ptr, weights_ptr, row, experts, weights, TOP_K, K_PAD)


@triton.jit
def _grouped_sigmoid_topk(
    logits_ptr,  # [M, E]
    correction_ptr,  # [E] fp32
    experts_ptr,  # [M, TOP_K] int64
    weights_ptr,  # [M, TOP_K] fp32
    scores_ptr,  # [M, E] fp32
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    G_PAD: tl.constexpr,
    NORMALISE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_PAD)
    inside = expert < E
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.load(logits_ptr + row * E + expert, mask=inside, other=0.0).to(tl.float32)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    tl.store(scores_ptr + row * E + expert, scores, mask=inside)
    choice = scores + tl.load(correction_ptr + expert, mask=inside, other=0.0)
    choice = _rankable(choice, inside)
    if TOP_GROUPS < GROUPS:
        group = tl.arange(0, G_PAD)
        group_of = expert // (E // GROUPS)
        group_scores = tl.full((G_PAD,), float("-inf"), tl.float32)
        for index in tl.static_range(GROUPS):
            own = tl.where(group_of == index, choice, float("-inf"))
            _at, best = _best(own, own, expert, 2, E_PAD, 2)
            group_scores = tl.where(group == index, tl.sum(best, axis=0), group_scores)
        is_allowed = expert < 0
        for _taken in tl.static_range(TOP_GROUPS):
            best_score = tl.max(group_scores, axis=0)
            at = tl.min(tl.where(group_scores == best_score, group, G_PAD), axis=0)
            is_allowed = is_allowed | (group_of == at)
            group_scores = tl.where(group == at, float("-inf"), group_scores)
        choice = tl.where(is_allowed & inside, choice, float("-inf"))
    experts, weights = _best(choice, scores, expert, TOP_K, E_PAD, K_PAD)
    if NORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    _store_choice(experts_ptr, weights_ptr, row, experts, weights * scale, TOP_K, K_PAD)


def softmax_topk(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.softmax_topk`."""
    logits = logits.contiguous()
    num_rows, num_experts = logits.shape
    experts, weights, scores = _outputs(logits, top_k)
    if num_rows:
        launch: Any = _softmax_topk[(num_rows,)]
        launch(
            logits,
            experts,
            weights,
            scores,
            E=num_experts,
            TOP_K=top_k,
            E_PAD=triton.next_power_of_2(num_experts),
            K_PAD=triton.next_power_of_2(top_k),
            NORMALISE=normalise,
            num_warps=_warps(num_experts),
            **overlapped(),
        )
    return experts, weights, scores


def grouped_sigmoid_topk(
    logits: Tensor,
    correction: Tensor,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.grouped_sigmoid_topk`."""
    logits = logits.contiguous()
    num_rows, num_experts = logits.shape
    experts, weights, scores = _outputs(logits, top_k)
    if num_rows:
        launch: Any = _grouped_sigmoid_topk[(num_rows,)]
        launch(
            logits,
            correction,
            experts,
            weights,
            scores,
            float(scale),
            E=num_experts,
            TOP_K=top_k,
            GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            E_PAD=triton.next_power_of_2(num_experts),
            K_PAD=triton.next_power_of_2(top_k),
            G_PAD=triton.next_power_of_2(num_groups),
            NORMALISE=normalise,
            num_warps=_warps(num_experts),
            **overlapped(),
        )
    return experts, weights, scores


def _outputs(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_experts = logits.shape
    return (
        logits.new_empty((num_rows, top_k), dtype=torch.int64),
        logits.new_empty((num_rows, top_k), dtype=torch.float32),
        logits.new_empty((num_rows, num_experts), dtype=torch.float32),
    )


def _warps(num_experts: int) -> int:
    return 1 if num_experts <= 256 else 4
