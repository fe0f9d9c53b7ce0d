"""What a target's own training needs besides rows: its loss, and experts that are all used."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.training.packing import Row


def next_token_loss(hidden: Tensor, lm_head: Tensor, row: Row) -> Tensor:
    """Sum of -log p(id) over the row's supervised labels, in nats.

    Args:
        hidden: [T, H] after the target's final norm.
        lm_head: [V, H].
    """
    logits = hidden.index_select(0, row.labels - 1) @ lm_head.T
    return F.cross_entropy(logits.float(), row.input_ids[row.labels], reduction="sum")


def expert_loads(chosen: Tensor, num_experts: int) -> Tensor:
    """Share of the choices [N, k] that each expert got: [E] fp32, sums to one."""
    flat = chosen.flatten()
    counts = torch.zeros(num_experts, dtype=torch.float32, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32)) / flat.numel()


def balance_loss(scores: Sequence[Tensor], chosen: Sequence[Tensor]) -> Tensor:
    """Mean over layers of E * sum_e load_e * mean score_e (Switch Transformer, arXiv 2101.03961).

    It is 1 where all experts are used alike.

    Args:
        scores: one [N, E] a layer; rows are brought to sum one.
        chosen: one [N, k] a layer.
    """
    losses = []
    for score, experts in zip(scores, chosen, strict=True):
        load = expert_loads(experts, score.shape[1])
        mean = (score / score.sum(-1, keepdim=True)).mean(0)
        losses.append(score.shape[1] * (load * mean).sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def shift_corrections_(
    corrections: Sequence[Tensor], chosen: Sequence[Tensor], rate: float
) -> None:
    """DeepSeek-V3's balancing without a loss (arXiv 2408.15664): the bias of an expert that got
    more than its share goes down by `rate`, of one that got less up.

    Args:
        corrections: one [E] a layer.
        chosen: one [N, k] a layer.
    """
    for bias, experts in zip(corrections, chosen, strict=True):
        load = expert_loads(experts, bias.numel())
        bias.add_(rate * (load.mean() - load).sign())


@torch.no_grad()
def bits_per_byte(
    forward: Callable[[Row], Tensor],
    lm_head: Tensor,
    rows: Sequence[Row],
    num_bytes: Tensor,
) -> float:
    """Bits that the model needs for a byte of the supervised text.

    Args:
        forward: row -> hidden [T, H].
        num_bytes: [V] bytes that each id stands for; 0 for special ids, whose bits count.
    """
    nats = torch.zeros((), dtype=torch.float64)
    size = torch.zeros((), dtype=torch.float64)
    for row in rows:
        nats += next_token_loss(forward(row), lm_head, row).double().cpu()
        size += num_bytes[row.input_ids[row.labels].cpu()].double().sum()
    return float(nats / size / torch.log(torch.tensor(2.0, dtype=torch.float64)))


def least_used(loads: Sequence[Tensor]) -> float:
    """Smallest load of an expert over its even share: 1 where all are used alike, 0 where one is
    never used."""
    return min(float(load.min() * load.numel()) for load in loads)
