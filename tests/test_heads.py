"""Every kind of head against straight-line code written from the seed text."""

import head_runs
import pytest
from head_runs import HEADS


@pytest.fixture(scope="module", params=HEADS)
def pair(request):
    return head_runs.load(HEADS[request.param])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_drafts_equal_the_straight_line(pair, k):
    """After prefills, and after rounds that kept any number of drafts."""
    rounds = head_runs.record(pair.target, pair.draft, k, max_tokens=9)
    for drafted in [*rounds[:3], *rounds[-3:]]:
        head_runs.check(pair, drafted)
