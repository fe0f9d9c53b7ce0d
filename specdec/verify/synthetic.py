"""A real rule's full work with a made-up outcome, to time steps of models that agree on nothing."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.runtime import uses_triton
from specdec.keys import Keys, Purpose, uniform
from specdec.state import Drafts, TargetDist, Verification
from specdec.verify import rule as declare

RULES = ("rejection", "delta", "greedy", "gumbel")


@declare(lossless=False, wants_draft_probs=True)
def synthetic(
    dist: TargetDist,
    drafts: Drafts,
    keys: Keys,
    *,
    rule: str = "rejection",
    accepted: float = 2.0,
    rates: Sequence[float] | None = None,
) -> Verification:
    """Runs `rule`, then decides by itself how many of the pending drafts stand.

    The accepted tokens are the drafts, whatever the rule thought of them; the rule's own last token
    ends the round. For timing only: the text means nothing.

    Args:
        rule: one of `RULES`, run in full.
        accepted: drafts a round; with a fraction, one more in that share of the rounds, by keys.
        rates: instead, chance of the draft at each position when all before it stand; positions
            past the list are refused.

    Raises:
        ConfigError: for an unknown rule, a negative number or a rate outside 0 to 1.
    """
    real = real_rule(rule)
    check(accepted, rates)
    verification = real(dist, drafts, keys)
    num_drafts = drafts.token_ids.shape[1]
    if dist.argmax.shape[0] == 0 or num_drafts == 0:
        return verification
    wanted = wanted_accepted(keys, num_drafts, accepted, rates)
    if uses_triton():
        from specdec.kernels.synthetic.kernel import decide
    else:
        from specdec.kernels.synthetic.reference import decide
    return decide(
        wanted,
        drafts.token_ids,
        drafts.num_drafts,
        dist.cu_num_logits,
        dist.batch_rows,
        verification.token_ids,
        verification.num_accepted,
    )


def wanted_accepted(
    keys: Keys, num_drafts: int, accepted: float, rates: Sequence[float] | None
) -> Tensor | int:
    """Drafts to accept: one number for all requests, or [R] where chance decides."""
    if rates is None:
        whole, share = int(accepted), accepted - int(accepted)
        if share == 0:
            return whole
        return whole + (uniform(keys, Purpose.ACCEPT, 0) < share).long()
    index = torch.arange(num_drafts, device=keys.seeds.device)[None, :]
    draws = uniform(keys, Purpose.ACCEPT, index)  # [R, K]
    stands = torch.zeros_like(draws, dtype=torch.bool)
    for position, rate in enumerate(rates[:num_drafts]):
        stands[:, position] = draws[:, position] < rate
    return stands.long().cumprod(-1).sum(-1)


@lru_cache(maxsize=8)
def real_rule(name: str) -> Callable[[TargetDist, Drafts, Keys], Verification]:
    if name not in RULES:
        raise ConfigError(f"verify.rule={name!r} is not one of {', '.join(RULES)}")
    return getattr(import_module(f"specdec.verify.{name}"), name)


def check(accepted: float, rates: Sequence[float] | None) -> None:
    if not 0 <= accepted < math.inf:
        raise ConfigError(f"verify.accepted={accepted} must be a finite number of at least 0")
    for rate in rates or ():
        if not 0 <= rate <= 1:
            raise ConfigError(f"verify.rates has {rate}; each must be from 0 to 1")
