"""Verification of one-hot proposals: greedy drafts, n-grams, suffixes."""

from dataclasses import replace

from specdec.keys import Keys
from specdec.state import Drafts, TargetDist, Verification
from specdec.verify import rule
from specdec.verify.rejection import rejection


@rule(lossless=True)
def delta(dist: TargetDist, drafts: Drafts, keys: Keys) -> Verification:
    """Accepts d with probability p(d); the recovered token is drawn from p without d.

    This is `rejection` with a one-hot q. It is lossless however d was chosen, so long as the choice
    is independent of the acceptance and recovery draws: a sampled draft is judged as a given one.
    Source: seed, the four-token example of NO_DRAFT_PROBS.
    """
    return rejection(dist, replace(drafts, q=None), keys)
