"""From logits to the distributions that rules and drafters (`draft_sampling`) draw from.

Nothing here waits for the device: no value is read on the host, so a step can be captured whole.
What the host knows from the requests comes as flags: `filters` (some row may have top-k, top-p or
min-p), `penalties` (some row may have one: only then are logits penalised) and `all_greedy` (every
row has temperature 0, so only the argmax is needed).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.row_stats.reference import RowStats
from specdec.kernels.runtime import uses_triton
from specdec.models.batch import Batch
from specdec.penalties import penalised
from specdec.state import GREEDY_EPSILON, INVALID_TOKEN_ID, State, TargetDist

KNOWN: dict[str, Any] = {"epsilon": GREEDY_EPSILON, "invalid": INVALID_TOKEN_ID}


def row_distribution(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    vocab_size: int,
    filters: bool = True,
    all_greedy: bool = False,
    slots: Tensor | None = None,
    cu_num_logits: Tensor | None = None,
) -> RowStats:
    """The distribution of each row after temperature, then top-k, top-p on what is left, min-p.

    Args:
        logits: [n, V] of any float dtype; columns at or past `vocab_size` are padding.
        temperature: [n] fp32, greedy below `GREEDY_EPSILON`.
        top_k: [n] int64, 0 turns it off.
        top_p, min_p: [n] fp32, 1 and 0 turn them off.
        filters: False promises that no row has a filter, and saves a sort.
        all_greedy: True promises that every row is greedy: temperature and filters go unread.
        slots: [R] int64; the parameters are then [S], and each row takes those of its request's
            slot, as `cu_num_logits` [R + 1] says.
    """
    ops, known = row_ops(), {"vocab_size": vocab_size, **KNOWN}
    if filters and not all_greedy:
        rows = temperature, top_k, top_p, min_p
        if slots is not None:
            rows = ops.request_rows(len(logits), slots, cu_num_logits, *rows)
        return ops.filtered_rows(logits, *rows, **known)
    if slots is not None:
        known |= {"slots": slots, "cu_num_logits": cu_num_logits}
    return ops.row_stats(logits, temperature, all_greedy=all_greedy, **known)


class RowOps(NamedTuple):
    """Ops of `kernels/row_stats` and `kernels/cutoff`."""

    row_stats: Callable[..., RowStats]
    filtered_rows: Callable[..., RowStats]
    request_rows: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def row_ops() -> RowOps:
    """On what ops run on here."""
    if uses_triton():
        from specdec.kernels.cutoff.kernel import filtered_rows
        from specdec.kernels.row_stats.kernel import request_rows, row_stats
    else:
        from specdec.kernels.cutoff.reference import filtered_rows
        from specdec.kernels.row_stats.reference import request_rows, row_stats
    return RowOps(row_stats, filtered_rows, request_rows)


def make_dist(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    cu_num_logits: Tensor,
    batch_rows: Tensor,
    vocab_size: int,
    filters: bool = True,
    all_greedy: bool = False,
    slots: Tensor | None = None,
) -> TargetDist:
    """The target's distribution at N rows; arguments as in `row_distribution` and `TargetDist`."""
    stats = row_distribution(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        vocab_size=vocab_size,
        filters=filters,
        all_greedy=all_greedy,
        slots=slots,
        cu_num_logits=cu_num_logits,
    )
    return TargetDist(
        logits=logits,
        cu_num_logits=cu_num_logits,
        batch_rows=batch_rows,
        vocab_size=vocab_size,
        all_greedy=all_greedy,
        **stats._asdict(),
    )


def process_logits(logits: Tensor, state: State, batch: Batch, *, vocab_size: int) -> TargetDist:
    """`make_dist` of a step's logits [N, V], each row under its request's sampling parameters, the
    penalties first."""
    if batch.penalties:
        logits = penalised(logits, state, batch, vocab_size=vocab_size)
    return make_dist(
        logits,
        temperature=state.temperature,
        top_k=state.top_k,
        top_p=state.top_p,
        min_p=state.min_p,
        cu_num_logits=batch.cu_num_logits,
        batch_rows=batch.logits_indices,
        vocab_size=vocab_size,
        filters=batch.filters,
        all_greedy=batch.all_greedy,
        slots=batch.request_slots,
    )


def target_probs(dist: TargetDist, rows: Tensor | None = None) -> Tensor:
    """Probabilities [n, V] fp32 of the given rows ([n] int64; all when None).

    Zero at filtered and padding ids, and everywhere in a row that is not finite.
    """
    if rows is None:
        rows = torch.arange(dist.argmax.shape[0], device=dist.argmax.device)
    logits = dist.logits[rows]
    probs = kept_probs(
        logits, dist.max[rows], dist.inv_temperature[rows], dist.cutoff[rows], dist.lse[rows]
    )
    ids = torch.arange(logits.shape[1], device=logits.device)
    one_hot = (ids == dist.argmax[rows, None]).float()
    probs = torch.where(dist.greedy[rows, None], one_hot, probs)
    padded = logits.shape[1] > dist.vocab_size
    return torch.where(ids < dist.vocab_size, probs, 0.0) if padded else probs


def prob_of(dist: TargetDist, rows: Tensor, ids: Tensor) -> Tensor:
    """Probability fp32 of each id in its row, without reading the rows' other ids.

    Args:
        rows, ids: int64 of one shape; an id outside [0, vocab_size) has probability 0.
    """
    real = (ids >= 0) & (ids < dist.vocab_size)
    logits = dist.logits[rows, ids.clamp(0, dist.vocab_size - 1)][..., None]
    probs = kept_probs(
        logits, dist.max[rows], dist.inv_temperature[rows], dist.cutoff[rows], dist.lse[rows]
    )[..., 0]
    probs = torch.where(dist.greedy[rows], (ids == dist.argmax[rows]).float(), probs)
    return torch.where(real, probs, 0.0)


def race_winners(logits: Tensor, dist: RowStats | TargetDist, exponentials: Tensor) -> Tensor:
    """Draws [n] int64 by Gumbel-max: the id of largest log p - log e among the kept ones.

    Args:
        logits: [n, V] real ids only.
        exponentials: [n, V] Exp(1); a kept id whose draw is +inf still beats every filtered id.
    """
    scaled = scaled_logits(logits, dist.max, dist.inv_temperature)
    scores = (scaled - exponentials.log()).clamp(min=torch.finfo(torch.float32).min)
    scores = torch.where(scaled >= dist.cutoff[:, None], scores, -torch.inf)
    decided = dist.greedy | (dist.argmax < 0)
    return torch.where(decided, dist.argmax, scores.argmax(-1))


def scaled_logits(logits: Tensor, top: Tensor, inv_temperature: Tensor) -> Tensor:
    """fp32 [..., V]; the maximum goes first, so that a small temperature cannot overflow."""
    return (logits.float() - top[..., None]).mul_(inv_temperature[..., None])


def kept_probs(
    logits: Tensor, top: Tensor, inv_temperature: Tensor, cut: Tensor, lse: Tensor
) -> Tensor:
    """Probabilities [..., V] fp32, 0 below the cutoff, of what `RowStats` keeps of each row."""
    scaled = scaled_logits(logits, top, inv_temperature)
    return torch.where(scaled >= cut[..., None], torch.exp(scaled - lse[..., None]), 0.0)
