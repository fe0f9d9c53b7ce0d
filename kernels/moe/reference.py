"""Chosen experts of few rows, and the choice, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.gated_act.reference import gated_act


def softmax_topk(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable experts of rows [M, E]; of equal ones, the kernel takes the lower id.

    Returns:
        experts [M, k] int64 by falling score, their weights [M, k] fp32 (with `normalise` they sum
        to one), and all scores [M, E] fp32.
    """
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    weights, experts = scores.topk(top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
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
    """DeepSeek-V3's choice (arXiv 2412.19437, section 2.1.2) of rows [M, E].

    Groups of experts are ranked by the sum of their two best corrected scores, and only experts of
    the `top_groups` best can be chosen. The correction [E] decides the choice; the weights come
    from the uncorrected scores.

    Returns:
        As `softmax_topk`, with the weights times `scale` and experts by falling corrected score.
    """
    scores = logits.float().sigmoid()
    choice = scores + correction
    if top_groups < num_groups:
        grouped = choice.unflatten(-1, (num_groups, -1))
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)  # [M, groups]
        chosen = group_scores.topk(top_groups, dim=-1).indices
        allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, chosen, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * scale, scores


def add_shared(out: Tensor, shared: Tensor | None, shared_gate: Tensor | None) -> Tensor:
    """out + shared * sigmoid(shared_gate), rows [M, H] and gates [M, 1]; None leaves a term out."""
    if shared is None:
        return out
    return out + (shared if shared_gate is None else shared * shared_gate.sigmoid())


def moe(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs: rows [M, H] -> [M, H] in their dtype.

    Args:
        gate_up: [E, 2 I, H].
        down: [E, H, I].
        experts: [M, k] int64.
        weights: [M, k] fp32.
        shared: [M, H] to add, see `add_shared`.
        shared_gate: [M, 1].
    """
    out = []
    for row, chosen in zip(hidden, experts, strict=True):
        inner = gated_act(gate_up[chosen] @ row)  # [k, I]
        out.append(torch.einsum("khi,ki->kh", down[chosen], inner))
    outputs = torch.stack(out) * weights.unsqueeze(-1)
    return add_shared(outputs.sum(dim=-2).to(hidden.dtype), shared, shared_gate)
