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


def moe(hidden: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' outputs: rows [M, H] -> [M, H] in their dtype.

    Args:
        gate_up: [E, 2 I, H].
        down: [E, H, I].
        experts: [M, k] int64.
        weights: [M, k] fp32.
    """
    out = []
    for row, chosen in zip(hidden, experts, strict=True):
        inner = gated_act(gate_up[chosen] @ row)  # [k, I]
        out.append(torch.einsum("khi,ki->kh", down[chosen], inner))
    outputs = torch.stack(out) * weights.unsqueeze(-1)
    return outputs.sum(dim=-2).to(hidden.dtype)
