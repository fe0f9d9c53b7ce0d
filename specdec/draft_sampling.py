"""Drafts drawn from a draft's logits, and q: exactly the distribution that each was drawn from."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.draft_sample.reference import MODES, KeptRows
from specdec.kernels.runtime import uses_triton
from specdec.keys import Keys, Purpose
from specdec.models.batch import VocabMap
from specdec.sampling import kept_probs
from specdec.state import GREEDY_EPSILON, DraftDist


class DraftSample(NamedTuple):
    """Proposals, and what `State.q_*` keep of the distributions that they were drawn from."""

    token_ids: Tensor  # [n] int64 target ids
    is_delta: Tensor  # [n] bool, True where the proposal is one-hot and q goes unread
    logits: Tensor  # [n, V_draft], -inf at padding columns where q is read
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
    q = _buffers(logits) if mode == "sample" and not all_greedy else None
    token_ids, is_delta = _draw_(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        vocab_size=vocab_size,
        keys=keys,
        offset=offset,
        mode=mode,
        vocab_map=vocab_map,
        filters=filters,
        all_greedy=all_greedy,
        keep=q,
    )
    if q is None:  # every proposal is one-hot
        zeros = torch.zeros_like(temperature)
        return DraftSample(token_ids, is_delta, logits, zeros, zeros, zeros, zeros)
    return DraftSample(token_ids, is_delta, *q[:5])


def sample_draft_(
    q: DraftDist,
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
    filters: bool = True,
    all_greedy: bool = False,
) -> tuple[Tensor, Tensor]:
    """`sample_draft` that leaves q of draft `offset` in the buffers, written as it is read.

    Rows that propose one-hot in every request (any mode but `sample`, or `all_greedy`) leave
    nothing. Buffers without columns (`V_draft` 0: no rule wants q) are not written either.

    Returns:
        Target ids [n] int64, and [n] bool, True where the proposal is one-hot.
    """
    keep = None
    if mode == "sample" and not all_greedy and q.logits.shape[2]:
        keep = KeptRows(
            logits=q.logits[:, offset],
            max=q.max[:, offset],
            inv_temperature=q.inv_temperature,
            cutoff=q.cutoff[:, offset],
            lse=q.lse[:, offset],
            slots=q.slots,
        )
    return _draw_(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        vocab_size=vocab_size,
        keys=keys,
        offset=offset,
        mode=mode,
        vocab_map=q.vocab_map,
        filters=filters,
        all_greedy=all_greedy,
        keep=keep,
    )


def _draw_(
    *rows: Tensor,
    keys: Keys,
    mode: str,
    vocab_map: VocabMap | None,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    if mode not in MODES:
        raise ValueError(f"draft sampling {mode!r} is not one of {', '.join(MODES)}")
    if uses_triton():
        from specdec.kernels.draft_sample.kernel import draft_sample_
    else:
        from specdec.kernels.draft_sample.reference import draft_sample_
    return draft_sample_(
        *rows,
        epsilon=GREEDY_EPSILON,
        seeds=keys.seeds,
        round_start=keys.round_start,
        purpose=int(Purpose.TARGET if mode == "shared" else Purpose.DRAFT),
        mode=mode,
        d2t=None if vocab_map is None else vocab_map.d2t,
        **flags,
    )


def _buffers(logits: Tensor) -> KeptRows:
    n = logits.shape[0]
    max, inv_temperature, cutoff, lse = logits.new_empty(4, n, dtype=torch.float32)
    slots = torch.arange(n, device=logits.device)
    return KeptRows(torch.empty_like(logits), max, inv_temperature, cutoff, lse, slots)


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
