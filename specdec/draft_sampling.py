"""Drafts drawn from a draft's logits, and q: exactly the distribution that each was drawn from."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.categorical.reference import categorical
from specdec.keys import Keys, Purpose, target_exponential, uniform
from specdec.models.batch import VocabMap
from specdec.sampling import kept_probs, race_winners, row_distribution
from specdec.state import DraftDist


class DraftSample(NamedTuple):
    """Proposals, and what `State.q_*` keep of the distributions that they were drawn from."""

    token_ids: Tensor  # [n] int64 target ids
    is_delta: Tensor  # [n] bool, True where the proposal is one-hot and q goes unread
    logits: Tensor  # [n, V_draft], -inf at padding columns
    max: Tensor  # [n] fp32
    inv_temperature: Tensor  # [n] fp32
    cutoff: Tensor  # [n] fp32
    lse: Tensor  # [n] fp32


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
        probs = kept_probs(real, dist.max, dist.inv_temperature, dist.cutoff, dist.lse)
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


def draft_probs(q: DraftDist, index: Tensor, num_ids: int) -> Tensor:
    """The distributions [R, num_ids] fp32 over target ids that drafts were sampled from.

    Args:
        index: [R] int64 draft index of each request, in [0, K).
    """
    slots = q.slots
    probs = kept_probs(
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
    probs = kept_probs(
        logits,
        q.max[slots, index],
        q.inv_temperature[slots],
        q.cutoff[slots, index],
        q.lse[slots, index],
    )[..., 0]
    return torch.where(real, probs, 0.0)
