"""Verification rules: `rule(dist, drafts, keys, *, ...) -> Verification`, one file each.

A rule decides how many drafts of each request stand and which token follows them. What all rules
share is here: their declared traits, and the record they return.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.runtime import uses_triton
from specdec.state import PLACEHOLDER_TOKEN_ID, Drafts, TargetDist, Verification


class RuleTraits(NamedTuple):
    """What a rule says of itself; the defaults are those of a function that says nothing."""

    lossless: bool | None = None  # None: unknown
    wants_draft_probs: bool = False  # drafts are worth sampling, and q is read
    noise: str | None = None  # "shared" hands the drafter the target's noise
    greedy_only: bool = False  # right at temperature 0 only


def rule(
    *,
    lossless: bool | None = None,
    wants_draft_probs: bool = False,
    noise: str | None = None,
    greedy_only: bool = False,
) -> Callable[[Any], Any]:
    """Declares a rule's traits; the function itself is left as it is.

    `noise` names the default of the rule's own keyword `noise`.
    """

    def declare(function: Any) -> Any:
        function.traits = RuleTraits(lossless, wants_draft_probs, noise, greedy_only)
        return function

    return declare


def traits_of(function: Callable) -> RuleTraits:
    """The traits of a rule, seen through `functools.partial` and with its bound keywords."""
    bound: dict[str, Any] = {}
    while isinstance(function, partial):
        bound = {**function.keywords, **bound}
        function = function.func
    traits = getattr(function, "traits", RuleTraits())
    if traits.noise is not None and "noise" in bound:
        traits = traits._replace(noise=bound["noise"])
    return traits


def position_rows(dist: TargetDist, num_positions: int) -> Tensor:
    """Logits rows [R, num_positions] of each request's positions, clamped to rows that exist."""
    index = torch.arange(num_positions, device=dist.argmax.device)
    return (dist.cu_num_logits[:-1, None] + index).clamp(max=dist.argmax.shape[0] - 1)


def count_accepted(dist: TargetDist, drafts: Drafts, accept: Tensor) -> Tensor:
    """Drafts [R] before the first that is refused, among those pending with a row after their own.

    Args:
        accept: [R, K] bool, what the rule says of each draft by itself.
    """
    limit = num_verifiable(dist, drafts)
    index = torch.arange(accept.shape[1], device=accept.device)
    return (accept & (index < limit[:, None])).long().cumprod(-1).sum(-1)


def num_verifiable(dist: TargetDist, drafts: Drafts) -> Tensor:
    """Drafts [R] that can stand: each needs its own logits row and one for the token after it."""
    num_rows = dist.cu_num_logits[1:] - dist.cu_num_logits[:-1]
    return torch.minimum(drafts.num_drafts, num_rows - 1).clamp(min=0)


def match(dist: TargetDist, drafts: Drafts, token_ids: Tensor) -> Verification:
    """Accepts drafts while they equal the target's own token, which is always the one kept.

    Args:
        token_ids: [N] int64, the target's token at each logits row.
    """
    if uses_triton():
        from specdec.kernels.verification import launch

        return launch.match(dist, drafts, token_ids)
    num_drafts = drafts.token_ids.shape[1]
    tokens = token_ids[position_rows(dist, num_drafts + 1)]  # [R, K + 1]
    num_accepted = count_accepted(dist, drafts, drafts.token_ids == tokens[:, :num_drafts])
    return complete(dist, drafts, num_accepted, tokens.gather(1, num_accepted[:, None])[:, 0])


def complete(
    dist: TargetDist, drafts: Drafts, num_accepted: Tensor, stop_token: Tensor
) -> Verification:
    """The record of a decision: accepted drafts, the token that ends the round, then padding.

    Args:
        num_accepted: [R] int64 drafts that stand.
        stop_token: [R] int64, the recovered or bonus token.
    """
    if uses_triton():
        from specdec.kernels.verification import launch

        return launch.complete(dist, drafts, num_accepted, stop_token)
    num_columns = drafts.token_ids.shape[1] + 1
    has_rows = dist.cu_num_logits[1:] > dist.cu_num_logits[:-1]
    num_accepted = torch.where(has_rows, num_accepted, 0)
    index = torch.arange(num_columns, device=num_accepted.device)[None, :]
    end = num_accepted[:, None]
    kept = torch.nn.functional.pad(drafts.token_ids, (0, 1), value=PLACEHOLDER_TOKEN_ID)
    token_ids = torch.where(index < end, kept, PLACEHOLDER_TOKEN_ID)
    token_ids = torch.where(has_rows[:, None] & (index == end), stop_token[:, None], token_ids)
    rows = position_rows(dist, num_columns).gather(1, torch.minimum(index, end))
    return Verification(
        token_ids=token_ids,
        rows=dist.batch_rows[rows],  # padding repeats the last committed token's row
        num_accepted=num_accepted,
        num_sampled=torch.where(has_rows, num_accepted + 1, 0),
        num_rejected=torch.where(has_rows, drafts.num_drafts - num_accepted, 0),
    )


def nothing(drafts: Drafts) -> Verification:
    """The record of a step without a logits row: prefill chunks only."""
    num_requests, num_drafts = drafts.token_ids.shape
    zeros = torch.zeros_like(drafts.num_drafts)
    grid = drafts.token_ids.new_zeros(num_requests, num_drafts + 1)
    return Verification(grid + PLACEHOLDER_TOKEN_ID, grid, zeros, zeros, zeros)
