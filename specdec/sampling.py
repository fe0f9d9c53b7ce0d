"""From logits to the distributions that rules and drafters (`draft_sampling`) draw from.

Nothing here waits for the device: no value is read on the host, so a step can be captured whole.
What the host knows from the requests comes as flags: `filters` (some row may have top-k, top-p or
min-p), `penalties` (some row may have one: only then are logits penalised) and `all_greedy` (every
row has temperature 0, so only the argmax is needed).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.cutoff.reference import cutoff as filter_cutoff
from specdec.kernels.runtime import uses_triton
from specdec.models.batch import Batch
from specdec.penalties import penalised
from specdec.state import GREEDY_EPSILON, INVALID_TOKEN_ID, State, TargetDist


class RowDist(NamedTuple):
    """What turns n rows of logits into probabilities.

    Scaled logit x = (logit - max) * inv_temperature; p = exp(x - lse) where x >= cutoff, else 0.
    A greedy row is one-hot at argmax. In a row that is not finite the cutoff is +inf: p = 0.
    """

    max: Tensor  # [n] fp32
    inv_temperature: Tensor  # [n] fp32, 1 on greedy rows
    cutoff: Tensor  # [n] fp32, -inf keeps all
    lse: Tensor  # [n] fp32 over kept ids, 0 on greedy rows
    greedy: Tensor  # [n] bool
    argmax: Tensor  # [n] int64, lowest id on ties; INVALID_TOKEN_ID on a row that is not finite
    block_mass: Tensor | None = None  # [n, C] fp32, see `TargetDist`; kernels leave it behind


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
) -> RowDist:
    """The distribution of each row after temperature, then top-k, top-p on what is left, min-p.

    Args:
        logits: [n, V] of any float dtype; columns at or past `vocab_size` are padding.
        temperature: [n] fp32, greedy below `GREEDY_EPSILON`.
        top_k: [n] int64, 0 turns it off.
        top_p, min_p: [n] fp32, 1 and 0 turn them off.
        filters: False promises that no row has a filter, and saves a sort.
        all_greedy: True promises that every row is greedy: temperature and filters go unread.
    """
    if uses_triton():
        parameters = temperature, top_k, top_p, min_p
        return _from_kernels(
            logits, *parameters, vocab_size, filters and not all_greedy, all_greedy
        )
    top, argmax = logits[:, :vocab_size].max(-1)
    finite = torch.isfinite(top)
    argmax = torch.where(finite, argmax, INVALID_TOKEN_ID)
    top = top.float()
    zeros = torch.zeros_like(top)
    if all_greedy:
        cut = torch.where(finite, 0.0, torch.inf)
        return RowDist(top, zeros + 1, cut, zeros, torch.ones_like(finite), argmax)

    greedy = temperature < GREEDY_EPSILON
    inv_temperature = torch.where(greedy, 1.0, 1.0 / temperature)
    scaled = scaled_logits(logits[:, :vocab_size], top, inv_temperature)
    if filters:
        cut = filter_cutoff(scaled, top_k, top_p, min_p)
        weights = torch.where(scaled >= cut[:, None], scaled.exp(), 0.0)
    else:
        cut = torch.full_like(top, -torch.inf)
        weights = scaled.exp()
    lse = torch.where(finite & ~greedy, weights.sum(-1).log(), zeros)
    return RowDist(
        max=top,
        inv_temperature=inv_temperature,
        cutoff=torch.where(finite, torch.where(greedy, zeros, cut), torch.inf),
        lse=lse,
        greedy=greedy,
        argmax=argmax,
    )


KNOWN: dict[str, Any] = {"epsilon": GREEDY_EPSILON, "invalid": INVALID_TOKEN_ID}


def _from_kernels(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    vocab_size: int,
    filters: bool,
    all_greedy: bool,
) -> RowDist:
    if not filters:
        from specdec.kernels.row_stats.kernel import row_stats

        stats = row_stats(
            logits, temperature, vocab_size=vocab_size, all_greedy=all_greedy, **KNOWN
        )
        return RowDist(*stats)
    from specdec.kernels.cutoff.kernel import filtered_rows

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parameters = (t.contiguous() for t in (temperature, top_k, top_p, min_p))
    return RowDist(*filtered_rows(logits, *parameters, vocab_size=vocab_size, **KNOWN))


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
) -> TargetDist:
    """The target's distribution at N rows; arguments as in `row_distribution` and `TargetDist`."""
    dist = row_distribution(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        vocab_size=vocab_size,
        filters=filters,
        all_greedy=all_greedy,
    )
    return TargetDist(
        logits=logits,
        cu_num_logits=cu_num_logits,
        batch_rows=batch_rows,
        vocab_size=vocab_size,
        all_greedy=all_greedy,
        **dist._asdict(),
    )


def process_logits(logits: Tensor, state: State, batch: Batch, *, vocab_size: int) -> TargetDist:
    """`make_dist` of a step's logits [N, V], each row under its request's sampling parameters, the
    penalties first."""
    if batch.penalties:
        logits = penalised(logits, state, batch, vocab_size=vocab_size)
    if uses_triton() and (batch.all_greedy or not batch.filters):
        from specdec.kernels.row_stats.kernel import row_stats

        stats = row_stats(
            logits,
            state.temperature,
            vocab_size=vocab_size,
            all_greedy=batch.all_greedy,
            slots=batch.request_slots,
            cu_num_logits=batch.cu_num_logits,
            **KNOWN,
        )
        return TargetDist(
            logits=logits,
            cu_num_logits=batch.cu_num_logits,
            batch_rows=batch.logits_indices,
            vocab_size=vocab_size,
            all_greedy=batch.all_greedy,
            **stats._asdict(),
        )
    sampling = state.temperature, state.top_k, state.top_p, state.min_p
    if uses_triton():
        from specdec.kernels.row_stats.kernel import request_rows

        rows = request_rows(logits.shape[0], batch.request_slots, batch.cu_num_logits, *sampling)
    else:
        slots = batch.request_slots[row_requests(batch.cu_num_logits, logits.shape[0])]
        rows = tuple(parameter[slots] for parameter in sampling)
    return make_dist(
        logits,
        temperature=rows[0],
        top_k=rows[1],
        top_p=rows[2],
        min_p=rows[3],
        cu_num_logits=batch.cu_num_logits,
        batch_rows=batch.logits_indices,
        vocab_size=vocab_size,
        filters=batch.filters,
        all_greedy=batch.all_greedy,
    )


def row_requests(cu_num_logits: Tensor, num_rows: int) -> Tensor:
    """The request [N] int64 that owns each logits row; rows past the last belong to the last."""
    rows = torch.arange(num_rows, device=cu_num_logits.device)
    owner = torch.searchsorted(cu_num_logits[1:].contiguous(), rows, right=True)
    return owner.clamp(max=cu_num_logits.shape[0] - 2)


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


def race_winners(logits: Tensor, dist: RowDist | TargetDist, exponentials: Tensor) -> Tensor:
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
    """Probabilities [..., V] fp32, 0 below the cutoff, of what `RowDist` keeps of each row."""
    scaled = scaled_logits(logits, top, inv_temperature)
    return torch.where(scaled >= cut[..., None], torch.exp(scaled - lse[..., None]), 0.0)
