"""Gumbel match: the tokens of plain sampling, whatever the drafter."""

import torch
from torch import Tensor

from specdec.kernels.row_stats.reference import row_requests
from specdec.kernels.runtime import uses_triton
from specdec.keys import Keys, Purpose, target_exponential
from specdec.sampling import race_winners
from specdec.state import Drafts, TargetDist, Verification
from specdec.verify import match, nothing, rule

NOISES = ("independent", "shared")


@rule(lossless=True, noise="independent")
def gumbel(
    dist: TargetDist, drafts: Drafts, keys: Keys, *, noise: str = "independent"
) -> Verification:
    """Samples every position by Gumbel-max and accepts drafts while they equal the target's token.

    The noise is a function of (seed, position) alone, so a position yields the same token in
    whatever round it is reached. `noise` decides what the drafter draws with, not what happens
    here: "shared" lets it use the target's noise, which is lossless under this rule only.

    Source: seed, engine walkthrough (`_rejection_sample_kernel`).
    """
    if noise not in NOISES:
        raise ValueError(f"verify.noise={noise!r} is not one of {', '.join(NOISES)}")
    num_rows = dist.argmax.shape[0]
    if num_rows == 0:
        return nothing(drafts)
    if dist.all_greedy:
        return match(dist, drafts, dist.argmax)
    if uses_triton():
        return match(dist, drafts, _race(dist, keys))
    requests = row_requests(dist.cu_num_logits, num_rows)
    offsets = torch.arange(num_rows, device=requests.device) - dist.cu_num_logits[requests]
    race = target_exponential(
        keys.seeds[requests], keys.round_start[requests] + offsets, dist.vocab_size
    )
    return match(dist, drafts, race_winners(dist.logits[:, : dist.vocab_size], dist, race))


def _race(dist: TargetDist, keys: Keys) -> Tensor:
    from specdec.kernels.race.kernel import race

    return race(
        dist.logits,
        dist.max,
        dist.inv_temperature,
        dist.cutoff,
        dist.greedy,
        dist.argmax,
        vocab_size=dist.vocab_size,
        seeds=keys.seeds,
        round_start=keys.round_start,
        purpose=int(Purpose.TARGET),
        cu_num_logits=dist.cu_num_logits,
    )
