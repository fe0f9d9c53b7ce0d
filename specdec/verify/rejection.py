"""Rejection sampling: what a draft over-proposed is taken back, what it lacks is drawn instead."""

import torch
from torch import Tensor

from specdec.draft_sampling import draft_prob_of, draft_probs
from specdec.kernels.categorical.reference import categorical
from specdec.kernels.runtime import uses_triton
from specdec.keys import Keys, Purpose, uniform
from specdec.sampling import prob_of, target_probs
from specdec.state import PLACEHOLDER_TOKEN_ID, Drafts, TargetDist, Verification
from specdec.verify import (
    complete,
    count_accepted,
    match,
    nothing,
    num_verifiable,
    position_rows,
    rule,
)


@rule(lossless=True, wants_draft_probs=True)
def rejection(dist: TargetDist, drafts: Drafts, keys: Keys) -> Verification:
    """Accepts draft x with probability min(1, p(x) / q(x)), in order, up to the first refusal.

    The refused position draws from max(p - q, 0), normalised, or from p where that is zero
    everywhere; when all drafts stand, a bonus token is drawn from p. q is one-hot where
    `drafts.is_delta`. A placeholder proposes nothing: it is refused and its position draws from p.
    Only one row a request is read whole. At temperature 0 this is greedy verification.

    Source: arXiv 2211.17192 and 2302.01318; seed section 8 and its A/B/C table.
    """
    num_logits = dist.argmax.shape[0]
    if num_logits == 0:
        return nothing(drafts)
    if dist.all_greedy:
        return match(dist, drafts, dist.argmax)
    if uses_triton() and dist.block_mass is not None:
        from specdec.kernels.verification import launch

        purposes = launch.Purposes(*map(int, (Purpose.ACCEPT, Purpose.RECOVER, Purpose.BONUS)))
        return launch.rejection(dist, drafts, keys, purposes)
    num_drafts = drafts.token_ids.shape[1]
    ids, is_delta = drafts.token_ids, drafts.is_delta
    if drafts.q is None or num_drafts == 0:
        is_delta = torch.ones_like(is_delta)
        proposed = torch.ones_like(ids, dtype=torch.float32)
    else:
        proposed = torch.where(is_delta, 1.0, draft_prob_of(drafts.q, ids))
    wanted = prob_of(dist, position_rows(dist, num_drafts), ids)
    index = torch.arange(num_drafts, device=ids.device)[None, :]
    draws = uniform(keys, Purpose.ACCEPT, index)
    # the product form never divides; a draft that q cannot have made is refused
    num_accepted = count_accepted(dist, drafts, (proposed > 0) & (draws * proposed < wanted))

    last = position_rows(dist, num_drafts + 1).gather(1, num_accepted[:, None])[:, 0]
    probs = target_probs(dist, last)  # [R, V]
    residual = (probs - _refused_probs(drafts, is_delta, num_accepted, dist)).clamp_(min=0)
    empty = residual.amax(-1, keepdim=True) == 0
    all_stand = num_accepted == num_verifiable(dist, drafts)
    draws = torch.where(
        all_stand,
        uniform(keys, Purpose.BONUS, num_accepted),
        uniform(keys, Purpose.RECOVER, num_accepted),
    )
    token = categorical(torch.where(empty, probs, residual), draws)
    invalid = dist.argmax[last] < 0
    return complete(dist, drafts, num_accepted, torch.where(invalid, dist.argmax[last], token))


def _refused_probs(
    drafts: Drafts, is_delta: Tensor, num_accepted: Tensor, dist: TargetDist
) -> Tensor:
    """q [R, V] of the draft refused in each request; 0 where none was refused or none proposed."""
    num_ids = dist.logits.shape[1]
    num_drafts = drafts.token_ids.shape[1]
    refused = num_accepted < num_verifiable(dist, drafts)
    at = num_accepted[:, None]
    ids = torch.nn.functional.pad(drafts.token_ids, (0, 1), value=PLACEHOLDER_TOKEN_ID)
    token = torch.where(refused, ids.gather(1, at)[:, 0], PLACEHOLDER_TOKEN_ID)[:, None]
    one_hot = (torch.arange(num_ids, device=token.device) == token).float()
    if drafts.q is None or num_drafts == 0:
        return one_hot
    one_hot_proposal = torch.nn.functional.pad(is_delta, (0, 1), value=True).gather(1, at)
    probs = draft_probs(drafts.q, num_accepted.clamp(max=num_drafts - 1), num_ids)
    return torch.where(one_hot_proposal | (token < 0), one_hot, probs)
