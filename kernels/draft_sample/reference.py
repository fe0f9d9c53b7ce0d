"""One draft a row of a draft head's logits, and what is kept of the distribution behind it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.categorical.reference import categorical
from specdec.kernels.cutoff.reference import filtered_rows
from specdec.kernels.philox.reference import philox, to_uniform
from specdec.kernels.race.reference import race
from specdec.kernels.row_stats.reference import row_stats

MODES = ("greedy", "sample", "shared")


class KeptRows(NamedTuple):
    """Buffers that q is left in; row i of a call goes to row `slots[i]` of each."""

    logits: Tensor  # [S, V_draft], rows contiguous; takes -inf at padding columns
    max: Tensor  # [S] fp32
    inv_temperature: Tensor  # [S] fp32
    cutoff: Tensor  # [S] fp32
    lse: Tensor  # [S] fp32
    slots: Tensor  # [n] int64


def draft_sample_(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    seeds: Tensor,
    round_start: Tensor,
    offset: int,
    purpose: int,
    mode: str,
    d2t: Tensor | None = None,
    filters: bool = True,
    all_greedy: bool = False,
    keep: KeptRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Target ids [n] int64, and [n] bool: True where the proposal is one-hot and q goes unread.

    `greedy` takes the argmax. `sample` draws with the one uniform of (seed, round start, offset,
    purpose) and leaves q in `keep`. `shared` races with the noise of position round start + offset
    under `purpose`, looked up by target id. Rows of temperature 0 are greedy in every mode; a row
    that is not finite proposes the draft's id 0, one-hot.

    Args:
        logits: [n, V_draft], rows contiguous; columns at or past `vocab_size` are padding.
        temperature, top_k, top_p, min_p: [n] as in `filtered_rows`.
        seeds, round_start: [n] int64.
        d2t: [V_draft] int64 target id of each draft id; None: the same vocabulary.
        filters: False promises that no row has a filter.
        all_greedy: True promises that every row is greedy.
        keep: written in mode `sample` unless `all_greedy`.
    """
    stats: dict[str, Any] = {"vocab_size": vocab_size, "epsilon": epsilon, "invalid": -1}
    all_greedy = all_greedy or mode == "greedy"
    if filters and not all_greedy:
        rows = filtered_rows(logits, temperature, top_k, top_p, min_p, **stats)
    else:
        rows = row_stats(logits, temperature, all_greedy=all_greedy, **stats)
    ids = rows.argmax
    is_delta = torch.ones_like(rows.greedy)
    if mode == "shared" and not all_greedy:
        ids = race(
            logits,
            *rows[:3],
            rows.greedy,
            rows.argmax,
            vocab_size=vocab_size,
            seeds=seeds,
            round_start=round_start,
            purpose=purpose,
            offset=offset,
            lanes=None if d2t is None else d2t[:vocab_size],
        )
    elif mode == "sample" and not all_greedy:
        is_delta = rows.greedy | (rows.argmax < 0)
        real = logits[:, :vocab_size]
        scaled = (real.float() - rows.max[:, None]) * rows.inv_temperature[:, None]
        kept = scaled >= rows.cutoff[:, None]
        probs = torch.where(kept, torch.exp(scaled - rows.lse[:, None]), 0.0)
        drawn = categorical(probs, to_uniform(philox(seeds, 0, round_start, offset, purpose)[0]))
        ids = torch.where(is_delta, rows.argmax, drawn)
        if keep is not None:
            padding = (0, logits.shape[1] - vocab_size)
            keep.logits[keep.slots] = pad(real, padding, value=-torch.inf)
            keep.max[keep.slots] = rows.max
            keep.inv_temperature[keep.slots] = rows.inv_temperature
            keep.cutoff[keep.slots] = rows.cutoff
            keep.lse[keep.slots] = rows.lse
    ids = ids.clamp(min=0)
    return ids if d2t is None else d2t[ids], is_delta
