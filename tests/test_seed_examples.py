"""The worked examples of the seed text, with its printed numbers."""

import pytest
import torch
from battery import frequencies, verify_many

from specdec.keys import Keys
from specdec.state import DraftDist, Drafts
from specdec.verify.delta import delta
from specdec.verify.rejection import rejection

TOLERANCE = 0.007  # over four sigma of 100,000 draws
A, B, C, D = range(4)


def log(*probs):
    return torch.tensor(probs).log()


def close(found, expected):
    return bool(torch.allclose(found, torch.tensor(expected).double(), atol=TOLERANCE))


def test_table_abc():
    """q = (.5, .1, .4), p = (.5, .3, .2): .8 is kept, and every refusal is mended with B."""
    target = torch.stack([log(0.5, 0.3, 0.2), log(0.2, 0.3, 0.5)])
    out, proposed = verify_many(rejection, target, log(0.5, 0.1, 0.4)[None])
    first, kept = out.token_ids[:, 0], out.num_accepted == 1
    assert close(frequencies(proposed[:, 0], 3), [0.5, 0.1, 0.4])
    left = [float((kept & (first == token)).double().mean()) for token in (A, B, C)]
    assert left == pytest.approx([0.5, 0.1, 0.2], abs=TOLERANCE)
    assert float(kept.double().mean()) == pytest.approx(0.8, abs=TOLERANCE)
    assert first[~kept].unique().tolist() == [B]
    assert proposed[~kept].unique().tolist() == [C]
    assert close(frequencies(first, 3), [0.5, 0.3, 0.2])


BONUS = log(0.10, 0.20, 0.30, 0.40)


def sure(token):
    row = torch.full((4,), -1e3)
    row[token] = 0.0
    return row


@pytest.mark.parametrize("rule", [rejection, delta])
def test_bonus_table_both_accepted(rule):
    """Drafts B, C stand: the third token is drawn from the target's own third row."""
    out, _ = verify_many(rule, torch.stack([sure(B), sure(C), BONUS]), ids=[B, C])
    assert out.num_accepted.unique().tolist() == [2]
    assert out.num_sampled.unique().tolist() == [3]
    assert out.token_ids[:, :2].unique(dim=0).tolist() == [[B, C]]
    assert close(frequencies(out.token_ids[:, 2], 4), [0.10, 0.20, 0.30, 0.40])


@pytest.mark.parametrize("rule", [rejection, delta])
def test_bonus_table_second_refused(rule):
    """C is refused and becomes D: the output is B, D, and no bonus follows."""
    out, _ = verify_many(rule, torch.stack([sure(B), sure(D), BONUS]), ids=[B, C], num_draws=1000)
    assert out.token_ids.unique(dim=0).tolist() == [[B, D, -1]]
    assert out.num_accepted.unique().tolist() == [1]
    assert out.num_rejected.unique().tolist() == [1]


@pytest.mark.parametrize("rule", [rejection, delta])
def test_no_draft_probs_table(rule):
    """B proposed with certainty, p(B) = .2: kept 20%; refused, A, C, D at .125, .375, .5."""
    target = torch.stack([BONUS, BONUS])
    out, _ = verify_many(rule, target, ids=[B])
    first, kept = out.token_ids[:, 0], out.num_accepted == 1
    assert float(kept.double().mean()) == pytest.approx(0.20, abs=TOLERANCE)
    assert first[kept].unique().tolist() == [B]
    assert close(frequencies(first[~kept], 4), [0.125, 0.0, 0.375, 0.5])
    assert not bool((first[~kept] == B).any())
    stage_two = [float((~kept & (first == token)).double().mean()) for token in (A, B, C, D)]
    assert stage_two == pytest.approx([0.10, 0.0, 0.30, 0.40], abs=TOLERANCE)
    assert close(frequencies(first, 4), [0.10, 0.20, 0.30, 0.40])


def test_no_draft_probs_is_the_residual_of_a_one_hot_q():
    """The delta rule is rejection with q = (0, 1, 0, 0), draw for draw."""
    num_draws = 2000
    target = torch.stack([BONUS, BONUS])
    by_delta, ids = verify_many(delta, target, ids=[B], num_draws=num_draws)
    q = DraftDist(
        logits=sure(B).expand(num_draws, 1, 4),
        max=torch.zeros(num_draws, 1),
        cutoff=torch.full((num_draws, 1), -torch.inf),
        lse=torch.zeros(num_draws, 1),
        inv_temperature=torch.ones(num_draws),
        slots=torch.arange(num_draws),
        vocab_map=None,
    )

    def with_q(dist, drafts, keys: Keys):
        assert torch.equal(drafts.token_ids, ids)
        full = Drafts(ids, torch.zeros_like(ids, dtype=torch.bool), drafts.num_drafts, q)
        return rejection(dist, full, keys)

    by_residual, _ = verify_many(with_q, target, ids=[B], num_draws=num_draws)
    assert torch.equal(by_delta.token_ids, by_residual.token_ids)
    assert 0 < int(by_delta.num_accepted.sum()) < num_draws


def test_walkthrough_round():
    """Drafts d0..d3 with d0, d1 right: [d0, d1, the target's token] is kept and d2, d3 refused."""
    target = torch.stack([sure(A), sure(B), sure(D), sure(A), sure(A)])
    out, _ = verify_many(delta, target, ids=[A, B, C, A], num_draws=1)
    assert out.token_ids.tolist() == [[A, B, D, -1, -1]]
    assert (out.num_accepted, out.num_sampled, out.num_rejected) == (2, 3, 2)
    assert out.rows[0, :3].tolist() == [0, 1, 2]
