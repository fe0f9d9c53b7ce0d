"""Looked-up drafts: the longest suffix wins, then the most recent occurrence."""

from types import SimpleNamespace

import pytest
import torch

from specdec.propose import ngram as module


@pytest.fixture
def look_up(monkeypatch):
    """look_up(text, K, **keywords) -> the drafts of one request as a list."""

    def run(text, k=3, **keywords):
        monkeypatch.setattr(module, "texts_after", lambda *_: torch.tensor([[*text, 0, 0]]))
        committed = SimpleNamespace(num_tokens=torch.tensor([len(text)]))
        out = module.ngram(None, None, committed, None, None, num_draft_tokens=k, **keywords)
        assert int(out.num_drafts) == (k if out.token_ids[0, 0] >= 0 else 0)
        return out.token_ids[0].tolist()

    return run


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], [4, 9, 2]),  # three tokens beat the later two
        ([2, 3, 7, 8, 2, 3, 5, 6, 2, 3], [5, 6, 2]),  # the later of two equals
        ([5, 1, 2, 1, 2], [1, 2, 1]),  # past the text's end it repeats
        ([1, 2, 3, 4, 5, 3], [-1, -1, -1]),  # one token is no match of two
        ([4], [-1, -1, -1]),
    ],
)
def test_what_followed_the_longest_match(look_up, text, found):
    assert look_up(text) == found


def test_a_long_search_is_bounded_by_the_text(look_up):
    """A million lengths to try cost no more than the text has tokens."""
    text = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    assert look_up(text, max_ngram=1_000_000) == look_up(text)
    assert look_up(text, min_ngram=500_000, max_ngram=1_000_000) == [-1, -1, -1]
