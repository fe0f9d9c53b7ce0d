"""Greedy verification: the plain greedy continuation, token for token."""

from specdec.keys import Keys
from specdec.state import Drafts, TargetDist, Verification
from specdec.verify import match, nothing, rule


@rule(lossless=True, greedy_only=True)
def greedy(dist: TargetDist, drafts: Drafts, keys: Keys) -> Verification:
    """Accepts drafts while they equal the target's argmax, whatever the temperature.

    Keys go unread. Source: seed section 8.3, greedy sampling.
    """
    if dist.argmax.shape[0] == 0:
        return nothing(drafts)
    return match(dist, drafts, dist.argmax)
