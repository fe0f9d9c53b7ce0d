"""Public faults in the distribution of the output, each with the right value (cases D1, D2, D3, D5,
N2, N3): acceptance probability, one-hot drafts, filters, greedy rows, residuals, tiny temperatures.
"""

import math

import pytest
import torch
from battery import frequencies, neutral, ragged_dist, verify_many

from specdec.draft_sampling import sample_draft
from specdec.keys import Keys
from specdec.sampling import row_distribution, target_probs
from specdec.state import Drafts
from specdec.verify.delta import delta
from specdec.verify.greedy import greedy
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

TOLERANCE = 0.007  # over four sigma of 100,000 draws
SAMPLING_RULES = [rejection, delta, gumbel]


def log(*probs):
    return torch.tensor(probs).log()


def rows(*logits):
    return torch.stack(logits)


def assert_close(found, expected):
    assert found.tolist() == pytest.approx(list(expected), abs=TOLERANCE)


def accepted_share(out):
    return float(out.num_accepted.double().mean())


def test_d1a_equal_distributions_accept_everything():
    uniform = torch.zeros(4)
    out, ids = verify_many(rejection, rows(uniform, uniform), uniform[None])
    assert accepted_share(out) == 1.0
    assert_close(frequencies(ids[:, 0], 4), [0.25] * 4)
    without_q, _ = verify_many(delta, rows(uniform, uniform), uniform[None])
    assert accepted_share(without_q) == pytest.approx(0.25, abs=TOLERANCE)


def test_d1b_acceptance_is_the_overlap():
    target, draft = log(0.1, 0.9), log(0.8, 0.2)
    out, _ = verify_many(rejection, rows(target, target), draft[None])
    assert accepted_share(out) == pytest.approx(0.30, abs=TOLERANCE)
    assert_close(frequencies(out.token_ids[:, 0], 2), [0.1, 0.9])


@pytest.mark.parametrize(
    ("temperature", "share", "rate"), [(0.5, 0.900, 0.600), (1, 0.750, 0.750), (2, 0.634, 0.866)]
)
def test_d1c_both_sides_at_the_requests_temperature(temperature, share, rate):
    target, draft = torch.tensor([0.0, math.log(3)]), torch.zeros(2)
    out, _ = verify_many(
        rejection, rows(target, target), draft[None], temperature=float(temperature)
    )
    assert float(frequencies(out.token_ids[:, 0], 2)[1]) == pytest.approx(share, abs=TOLERANCE)
    assert accepted_share(out) == pytest.approx(rate, abs=TOLERANCE)


@pytest.mark.parametrize("verify", SAMPLING_RULES)
def test_d2_a_greedy_draft_is_one_hot(verify):
    target, draft = log(0.05, 0.15, 0.25, 0.25, 0.30), log(0.6, 0.2, 0.1, 0.05, 0.05)
    out, ids = verify_many(verify, rows(target, target), draft[None], mode="greedy")
    assert ids.unique().tolist() == [0]
    assert_close(frequencies(out.token_ids[:, 0], 5), [0.05, 0.15, 0.25, 0.25, 0.30])


@pytest.mark.parametrize("verify", SAMPLING_RULES)
def test_d3_filters_at_every_verified_position(verify):
    target = log(0.50, 0.30, 0.12, 0.08)
    out, _ = verify_many(verify, rows(target, target, target), ids=[2, 2], min_p=0.5)
    first = frequencies(out.token_ids[:, 0], 4)
    assert_close(first, [0.625, 0.375, 0, 0])
    assert first[2:].tolist() == [0, 0]
    assert out.num_accepted.unique().tolist() == [0]


@pytest.mark.parametrize("verify", SAMPLING_RULES)
def test_d3_filters_at_the_bonus_position(verify):
    target, certain = log(0.50, 0.30, 0.12, 0.08), torch.tensor([0.0, -1e3, -1e3, -1e3])
    out, _ = verify_many(verify, rows(certain, target), ids=[0], min_p=0.5)
    assert out.num_accepted.unique().tolist() == [1]
    bonus = frequencies(out.token_ids[:, 1], 4)
    assert_close(bonus, [0.625, 0.375, 0, 0])
    assert bonus[2:].tolist() == [0, 0]


@pytest.mark.parametrize("verify", [*SAMPLING_RULES, greedy])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_d5_greedy_row_in_a_mixed_batch(verify, place):
    """Ties go to the lowest id, whatever the seed, the place in the batch, or top_p."""
    logits = torch.randn(3, 3)
    logits[place] = torch.tensor([1.0, 1.0, 0.0])
    sampling = {
        "temperature": torch.ones(3).index_fill(0, torch.tensor(place), 0.0),
        "top_p": torch.ones(3).index_fill(0, torch.tensor(place), 0.9),
    }
    dist = ragged_dist(logits, torch.ones(3, dtype=torch.int64), **sampling)
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    alone = ragged_dist(logits[place : place + 1], one, temperature=torch.zeros(1))

    for seed in range(84):  # with the places and rules above a thousand runs
        keys = Keys(seed + torch.arange(3), torch.full((3,), 8))
        grid = torch.zeros(3, 0, dtype=torch.int64)
        out = verify(dist, Drafts(grid, grid.bool(), torch.zeros(3, dtype=torch.int64)), keys)
        assert out.token_ids[place].tolist() == [0]
        assert bool((out.token_ids >= 0).all())
        own_keys = Keys(keys.seeds[:1], keys.round_start[:1])
        own = verify(alone, Drafts(grid[:1], grid[:1].bool(), zero), own_keys)
        assert own.token_ids.tolist() == [[0]]
    assert not bool(torch.isnan(target_probs(dist)).any())


def test_n2_residual_is_normalised():
    target, draft = log(0.05, 0.15, 0.25, 0.25, 0.30), log(0.30, 0.25, 0.25, 0.15, 0.05)
    out, _ = verify_many(rejection, rows(target, target), draft[None])
    assert accepted_share(out) == pytest.approx(0.65, abs=TOLERANCE)
    refused = out.token_ids[out.num_accepted == 0, 0]
    shares = frequencies(refused, 5)
    assert shares[:3].tolist() == [0, 0, 0]
    assert shares[3:].tolist() == pytest.approx([0.286, 0.714], abs=0.012)  # 35,000 draws
    assert_close(frequencies(out.token_ids[:, 0], 5), [0.05, 0.15, 0.25, 0.25, 0.30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_n2_empty_residual_falls_back_to_p(dtype, monkeypatch):
    """p = q, and a refusal forced from outside: the recovered token is drawn from p."""
    from specdec.verify import rejection as module

    logits = log(0.05, 0.15, 0.25, 0.25, 0.30).to(dtype)
    monkeypatch.setattr(module, "draft_prob_of", lambda q, ids: torch.full(ids.shape, 1e9))
    out, _ = verify_many(rejection, rows(logits, logits), logits[None])
    assert accepted_share(out) == 0
    assert_close(frequencies(out.token_ids[:, 0], 5), logits.double().softmax(-1).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-6, 1e-30, 0.0])
@pytest.mark.parametrize("mode", ["greedy", "sample", "shared"])
def test_n3_tiny_temperatures(temperature, dtype, mode):
    logits = torch.full((1000,), -20.0, dtype=dtype)
    logits[417] = 42.0
    sampling = neutral(1, temperature) | {"top_p": torch.tensor([0.95])}
    row = row_distribution(logits[None], **sampling, vocab_size=1000)
    finite = [row.max, row.inv_temperature, row.cutoff.clamp(min=-1), row.lse]
    assert bool(torch.isfinite(torch.stack(finite)).all())
    probs = target_probs(ragged_dist(logits[None], torch.ones(1, dtype=torch.int64), **sampling))
    assert abs(float(probs.sum()) - 1) <= 1e-5
    for verify in (rejection, delta, gumbel, greedy):
        out, ids = verify_many(
            verify,
            rows(logits, logits),
            logits[None],
            num_draws=500,
            mode=mode,
            temperature=temperature,
            top_p=0.95,
        )
        assert ids.unique().tolist() == [417]
        assert out.token_ids.unique().tolist() == [417]
        assert out.num_accepted.unique().tolist() == [1]


def test_greedy_boundary_is_the_same_everywhere():
    """At 9.9e-6 a tie is broken by id, at 1e-5 by a draw: in the target and in the drafter."""
    logits = torch.tensor([1.0, 1.0, 0.0])
    for temperature, ids in ((9.9e-6, [0]), (1e-5, [0, 1])):
        out, drafts = verify_many(
            rejection, rows(logits, logits), logits[None], num_draws=500, temperature=temperature
        )
        assert drafts.unique().tolist() == ids
        assert out.token_ids.unique().tolist() == ids
    sample = sample_draft(
        logits[None],
        **neutral(1, 9.9e-6),
        vocab_size=3,
        keys=Keys(torch.zeros(1).long(), torch.zeros(1).long()),
        offset=0,
        mode="sample",
    )
    assert sample.is_delta.tolist() == [True]
