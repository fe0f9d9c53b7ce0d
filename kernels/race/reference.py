"""Gumbel-max draws: each row races with Exp(1) noise that is a function of (seed, position, id)."""

import torch
from torch import Tensor

from specdec.kernels.philox.reference import philox, to_exponential
from specdec.kernels.row_stats.reference import row_requests


def race(
    logits: Tensor,
    top: Tensor,
    inv_temperature: Tensor,
    cutoff: Tensor,
    greedy: Tensor,
    argmax: Tensor,
    *,
    vocab_size: int,
    seeds: Tensor,
    round_start: Tensor,
    purpose: int,
    offset: int = 0,
    cu_num_logits: Tensor | None = None,
    lanes: Tensor | None = None,
) -> Tensor:
    """Ids [n] int64 of largest x - log e among the kept, x = (logit - top) * inv_temperature.

    A kept id whose e is +inf still beats every filtered one. Greedy rows and those of negative
    argmax take their argmax.

    Args:
        logits: [n, V], columns at or past `vocab_size` unread.
        top, inv_temperature, cutoff: [n] fp32; greedy: [n] bool; argmax: [n] int64.
        seeds, round_start: [n] int64; row i races at position `round_start[i] + offset`.
        cu_num_logits: [n_requests + 1] int64; seeds and round_start are then the requests', and a
            row's position counts on from its request's.
        lanes: [vocab_size] int64, the lane of noise of each id; its own number when None.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)
    owner, positions = rows, round_start + offset
    if cu_num_logits is not None:
        owner = row_requests(cu_num_logits, len(rows))
        positions = round_start[owner] + rows - cu_num_logits[owner] + offset
    ids = torch.arange(vocab_size, device=logits.device)[None, :] if lanes is None else lanes[None]
    words = torch.stack(philox(seeds[owner, None], ids // 4, positions[:, None], 0, purpose))
    noise = to_exponential(words.gather(0, (ids % 4).expand_as(words[0])[None])[0])
    scaled = (logits[:, :vocab_size].float() - top[:, None]) * inv_temperature[:, None]
    scores = (scaled - noise.log()).clamp(min=torch.finfo(torch.float32).min)
    scores = torch.where(scaled >= cutoff[:, None], scores, -torch.inf)
    return torch.where(greedy | (argmax < 0), argmax, scores.argmax(-1))
