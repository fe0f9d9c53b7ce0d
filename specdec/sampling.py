"""From logits to the distributions that rules and drafters draw from.

Nothing here waits for the device: no value is read on the host, so a step can be captured whole.
What the host knows from the requests comes as flags: `filters` (some row may have top-k, top-p or
min-p) and `all_greedy` (every row has temperature 0, so only the argmax is needed).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.categorical.reference import categorical
from specdec.kernels.cutoff.reference import cutoff as filter_cutoff
from specdec.keys import Keys, Purpose, target_exponential, uniform
from specdec.models.batch import Batch, VocabMap
from specdec.state import GREEDY_EPSILON, INVALID_TOKEN_ID, DraftDist, State, TargetDist


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


class DraftSample(NamedTuple):
    """Proposals, and what `State.q_*` keep of the distributions that they were drawn from."""

    token_ids: Tensor  # [n] int64 target ids
    is_delta: Tensor  # [n] bool, True where the proposal is one-hot and q goes unread
    logits: Tensor  # [n, V_draft], -inf at padding columns
    max: Tensor  # [n] fp32
    inv_temperature: Tensor  # [n] fp32
    cutoff: Tensor  # [n] fp32
    lse: Tensor  # [n] fp32


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
    scaled = _scaled(logits[:, :vocab_size], top, inv_temperature)
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


def process_logits(
    logits: Tensor,
    state: State,
    batch: Batch,
    *,
    vocab_size: int,
    filters: bool = True,
    all_greedy: bool = False,
) -> TargetDist:
    """`make_dist` of a step's logits [N, V], each row under its request's sampling parameters."""
    slots = batch.request_slots[row_requests(batch.cu_num_logits, logits.shape[0])]
    return make_dist(
        logits,
        temperature=state.temperature[slots],
        top_k=state.top_k[slots],
        top_p=state.top_p[slots],
        min_p=state.min_p[slots],
        cu_num_logits=batch.cu_num_logits,
        batch_rows=batch.logits_indices,
        vocab_size=vocab_size,
        filters=filters,
        all_greedy=all_greedy,
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
    probs = _probs(
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
    probs = _probs(
        logits, dist.max[rows], dist.inv_temperature[rows], dist.cutoff[rows], dist.lse[rows]
    )[..., 0]
    probs = torch.where(dist.greedy[rows], (ids == dist.argmax[rows]).float(), probs)
    return torch.where(real, probs, 0.0)


def draft_probs(q: DraftDist, index: Tensor, num_ids: int) -> Tensor:
    """The distributions [R, num_ids] fp32 over target ids that drafts were sampled from.

    Args:
        index: [R] int64 draft index of each request, in [0, K).
    """
    slots = q.slots
    probs = _probs(
        q.logits[slots, index],
        q.max[slots, index],
        q.inv_temperature[slots],
        q.cutoff[slots, index],
        q.lse[slots, index],
    )
    if q.vocab_map is not None:
        local = q.vocab_map.t2d[:num_ids]
        probs = torch.where(local >= 0, probs[:, local.clamp(min=0)], 0.0)
    return pad(probs, (0, num_ids - probs.shape[1]))


def draft_prob_of(q: DraftDist, ids: Tensor) -> Tensor:
    """Probability [R, K] fp32 of the target ids [R, K] under q; 0 for ids it cannot make."""
    local = ids
    if q.vocab_map is not None:
        known = ids.clamp(0, q.vocab_map.t2d.shape[0] - 1)
        local = torch.where(ids == known, q.vocab_map.t2d[known], -1)
    real = (local >= 0) & (local < q.logits.shape[-1])
    index = torch.arange(ids.shape[1], device=ids.device)[None, :]
    slots = q.slots[:, None]
    logits = q.logits[slots, index, local.clamp(0, q.logits.shape[-1] - 1)][..., None]
    probs = _probs(
        logits,
        q.max[slots, index],
        q.inv_temperature[slots],
        q.cutoff[slots, index],
        q.lse[slots, index],
    )[..., 0]
    return torch.where(real, probs, 0.0)


def race_winners(logits: Tensor, dist: RowDist | TargetDist, exponentials: Tensor) -> Tensor:
    """Draws [n] int64 by Gumbel-max: the id of largest log p - log e among the kept ones.

    Args:
        logits: [n, V] real ids only.
        exponentials: [n, V] Exp(1); a kept id whose draw is +inf still beats every filtered id.
    """
    scaled = _scaled(logits, dist.max, dist.inv_temperature)
    scores = (scaled - exponentials.log()).clamp(min=torch.finfo(torch.float32).min)
    scores = torch.where(scaled >= dist.cutoff[:, None], scores, -torch.inf)
    decided = dist.greedy | (dist.argmax < 0)
    return torch.where(decided, dist.argmax, scores.argmax(-1))


def sample_draft(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    vocab_size: int,
    keys: Keys,
    offset: int,
    mode: str,
    vocab_map: VocabMap | None = None,
    filters: bool = True,
    all_greedy: bool = False,
) -> DraftSample:
    """One draft for each of n rows.

    `greedy` takes the argmax. `sample` draws with one uniform (purpose DRAFT); its q is exactly
    what was drawn from. `shared` races with the target's own noise of that position, looked up by
    target id, so that drafter and target agree as often as their distributions let them. Rows of
    temperature 0 are greedy in every mode. A row that is not finite proposes the draft's id 0,
    one-hot, which every lossless rule takes.

    Args:
        logits: [n, V_draft]; the other row arguments and flags as in `row_distribution`.
        keys: seed and round start of each row.
        offset: the draft's index j in the round, so that it sits at position `round_start + j`.
        vocab_map: set where the draft's vocabulary is reduced.
    """
    if mode not in ("greedy", "sample", "shared"):
        raise ValueError(f"draft sampling {mode!r} is not one of greedy, sample, shared")
    dist = row_distribution(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        vocab_size=vocab_size,
        filters=filters,
        all_greedy=all_greedy or mode == "greedy",
    )
    real = logits[:, :vocab_size]
    is_delta = torch.ones_like(dist.greedy)
    ids = dist.argmax
    if mode == "shared" and not all_greedy:
        lanes = vocab_size if vocab_map is None else vocab_map.t2d.shape[0]
        race = target_exponential(keys.seeds, keys.round_start + offset, lanes)
        race = race if vocab_map is None else race[:, vocab_map.d2t]
        ids = race_winners(real, dist, race)
    elif mode == "sample" and not all_greedy:
        is_delta = dist.greedy | (dist.argmax < 0)
        probs = _probs(real, dist.max, dist.inv_temperature, dist.cutoff, dist.lse)
        drawn = categorical(probs, uniform(keys, Purpose.DRAFT, offset))
        ids = torch.where(is_delta, dist.argmax, drawn)
    ids = ids.clamp(min=0)
    return DraftSample(
        token_ids=ids if vocab_map is None else vocab_map.d2t[ids],
        is_delta=is_delta,
        logits=pad(real, (0, logits.shape[1] - vocab_size), value=-torch.inf),
        max=dist.max,
        inv_temperature=dist.inv_temperature,
        cutoff=dist.cutoff,
        lse=dist.lse,
    )


def _scaled(logits: Tensor, top: Tensor, inv_temperature: Tensor) -> Tensor:
    """fp32 [..., V]; the maximum goes first, so that a small temperature cannot overflow."""
    return (logits.float() - top[..., None]).mul_(inv_temperature[..., None])


def _probs(
    logits: Tensor, top: Tensor, inv_temperature: Tensor, cut: Tensor, lse: Tensor
) -> Tensor:
    scaled = _scaled(logits, top, inv_temperature)
    return torch.where(scaled >= cut[..., None], torch.exp(scaled - lse[..., None]), 0.0)
