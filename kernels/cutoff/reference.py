"""Top-k, top-p and min-p as one threshold on scaled logits."""

from typing import Any

import torch
from torch import Tensor

from specdec.kernels.row_stats.reference import RowStats, kept_stats

SLACK = 1e-6  # relative: a boundary that real numbers meet exactly is met in fp32 too


def filtered_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    invalid: int,
) -> RowStats:
    """Statistics of rows [n, V] after temperature, then top-k, top-p on what is left, min-p.

    Args:
        logits, temperature, vocab_size, epsilon, invalid: as in `row_stats`.
        top_k, top_p, min_p: as in `cutoff`.
    """
    stats: dict[str, Any] = {"vocab_size": vocab_size, "epsilon": epsilon, "invalid": invalid}
    real = logits[:, :vocab_size].float()
    inv_temperature = torch.where(temperature < epsilon, 1.0, 1.0 / temperature)
    scaled = (real - real.amax(-1, keepdim=True)) * inv_temperature[:, None]
    cut = cutoff(scaled, top_k, top_p, min_p)
    return kept_stats(logits, temperature, cut, **stats)


def cutoff(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest scaled logit [n] fp32 that the filters keep, in the order top-k, top-p, min-p.

    top-k: the k-th largest value. top-p, on what is left: the largest value such that the ids at or
    above it hold the wanted share of the mass. min-p: that share of the largest probability. Ids
    equal to the threshold are all kept, and the largest always is.

    Args:
        scaled: [n, V] fp32 `(logit - max) * inv_temperature`, at most 0; -inf marks an excluded id.
        top_k: [n] int64, 0 turns it off.
        top_p: [n] fp32, 1 turns it off.
        min_p: [n] fp32, 0 turns it off.
    """
    ordered = _descending(scaled)
    kth = _at(ordered, top_k - 1)
    by_count = torch.where(top_k > 0, kth, -torch.inf)
    weights = torch.where(ordered >= by_count[:, None], ordered.exp(), 0.0)
    cumulative = weights.cumsum(-1)
    wanted = top_p * (1 - SLACK) * cumulative[:, -1]
    num_kept = (cumulative - weights < wanted[:, None]).sum(-1)
    by_mass = torch.where(top_p < 1, _at(ordered, num_kept - 1), -torch.inf)
    by_peak = min_p.log() - SLACK
    return torch.maximum(torch.maximum(by_count, by_mass), by_peak).clamp(max=0.0)


def _descending(scaled: Tensor) -> Tensor:
    """Each row sorted, largest first.

    The bits of nonpositive floats order them backwards as integers, so that with the row's number
    in the upper half all rows are one flat integer sort: a radix sort, five times faster on a CPU
    than sorting rows of floats.
    """
    rows = torch.arange(scaled.shape[0], device=scaled.device)[:, None] << 32
    keys = (rows + scaled.abs().view(torch.int32)).flatten().sort().values
    return -(keys & 0x7FFFFFFF).int().view(torch.float32).view(scaled.shape)


def _at(ordered: Tensor, index: Tensor) -> Tensor:
    return ordered.gather(1, index.clamp(0, ordered.shape[1] - 1)[:, None])[:, 0]
