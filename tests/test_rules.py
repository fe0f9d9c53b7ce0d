"""The four rules under the battery, and that the battery catches rules that are wrong."""

from dataclasses import replace
from functools import partial

import battery
import pytest
import torch
from battery import Chain, decode, joint_fits, random_chain

from specdec.draft_sampling import sample_draft
from specdec.kernels.categorical.reference import categorical
from specdec.keys import Keys, Purpose
from specdec.sampling import row_distribution
from specdec.state import Drafts
from specdec.verify import rejection as rejection_module
from specdec.verify.delta import delta
from specdec.verify.greedy import greedy
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

DRAWS = 200_000
SAMPLING_RULES = [
    pytest.param(delta, "greedy", id="delta-greedy"),
    pytest.param(delta, "sample", id="delta-sample"),
    pytest.param(rejection, "greedy", id="rejection-greedy"),
    pytest.param(rejection, "sample", id="rejection-sample"),
    pytest.param(gumbel, "greedy", id="gumbel-greedy"),
    pytest.param(gumbel, "sample", id="gumbel-sample"),
    pytest.param(partial(gumbel, noise="shared"), "shared", id="gumbel-shared"),
]


def all_good(fits):
    return all(f.good for f in fits)


@pytest.mark.parametrize(("verify", "mode"), SAMPLING_RULES)
def test_joint_over_rounds_is_the_targets(verify, mode):
    """Four tokens take one to four rounds of 0 to 3 drafts whose q depends on prefix and index."""
    chain = random_chain(3, 3, seed=1)
    out = decode(verify, chain, num_requests=DRAWS, length=4, mode=mode, seed=11)
    fits = joint_fits(out.tokens, chain.target)
    assert all_good(fits), fits
    assert 0.1 < out.accepted / out.drafted < 0.95


@pytest.mark.parametrize("verify", [delta, rejection, gumbel])
def test_joint_with_placeholders(verify):
    """A position whose draft is hidden behind -1 is drawn from the target."""
    chain = random_chain(3, 3, seed=1)
    out = decode(
        verify, chain, num_requests=DRAWS, length=4, mode="sample", placeholders=True, seed=12
    )
    fits = joint_fits(out.tokens, chain.target)
    assert all_good(fits), fits


@pytest.mark.parametrize(("verify", "mode"), SAMPLING_RULES)
def test_joint_under_temperature_and_filters(verify, mode):
    """Every verified, recovered and bonus position is filtered, and so is q."""
    chain = random_chain(6, 2, seed=2)
    sampling = {
        "temperature": torch.tensor([0.8]),
        "top_k": torch.tensor([5]),
        "top_p": torch.tensor([0.93]),
        "min_p": torch.tensor([0.05]),
    }
    wanted = battery.filtered(chain.target, 0.8, 5, 0.93, 0.05)
    assert int((wanted == 0).sum()) > 6, "the filters cut nothing"
    out = decode(verify, chain, num_requests=DRAWS, length=3, mode=mode, sampling=sampling, seed=23)
    fits = joint_fits(out.tokens, wanted)
    assert all_good(fits), fits


@pytest.mark.parametrize(("verify", "mode"), SAMPLING_RULES)
@pytest.mark.slow
def test_joint_of_more_chains(verify, mode):
    """Five chains of other shapes, sharper and with more drafts."""
    for seed in range(5):
        chain = random_chain(3, 5, seed=seed, sharpness=1.5)
        out = decode(verify, chain, num_requests=DRAWS, length=5, mode=mode, seed=seed)
        fits = joint_fits(out.tokens, chain.target)
        assert all_good(fits), (seed, fits)


@pytest.mark.parametrize("num_draws", [5_000, pytest.param(DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("verify", "mode"), SAMPLING_RULES)
def test_one_token_of_a_wide_vocabulary(verify, mode, num_draws):
    """V past one block of the categorical draw, with mass at both sides of the blocks' edge."""
    vocab_size, chunk = 1025, 5_000
    logits = torch.full((vocab_size,), -30.0)
    heavy = torch.tensor([0, 3, 511, 1022, 1023, 1024])
    logits[heavy] = torch.tensor([0.1, 0.5, 0.2, 0.4, 0.3, 0.6]).log()
    draft_logits = logits.clone()
    draft_logits[heavy] = torch.tensor([0.4, 0.1, 0.5, 0.1, 0.6, 0.2]).log()
    drawn = []
    for start in range(0, num_draws, chunk):
        keys = Keys(torch.arange(start, start + chunk), torch.full((chunk,), 9))
        sample = sample_draft(
            draft_logits.expand(chunk, -1),
            **battery.neutral(chunk),
            vocab_size=vocab_size,
            keys=keys,
            offset=0,
            mode=mode,
            filters=False,
        )
        one = torch.ones(chunk, dtype=torch.int64)
        dist = battery.ragged_dist(
            logits.expand(chunk, -1).repeat(2, 1), one * 2, vocab_size, filters=False
        )
        drafts = Drafts(
            sample.token_ids[:, None], sample.is_delta[:, None], one, battery.keep_q([sample])
        )
        drawn.append(verify(dist, drafts, keys).token_ids[:, 0])
    battery.assert_fits(torch.cat(drawn), logits.double().softmax(-1))


def reduced_vocabulary():
    """A draft over ids 1, 2, 4 of 5: probabilities fp64 and the map."""
    from specdec.models.batch import VocabMap

    return VocabMap(torch.tensor([1, 2, 4]), torch.tensor([-1, 0, 1, -1, 2]))


@pytest.mark.parametrize(("verify", "mode"), SAMPLING_RULES)
def test_reduced_draft_vocabulary(verify, mode):
    """Ids that the drafter cannot make come from the residual, at the target's rate."""
    vocab_map = reduced_vocabulary()
    target = torch.tensor([0.15, 0.3, 0.1, 0.2, 0.25])
    draft = torch.tensor([0.5, 0.3, 0.2]).log().expand(DRAWS, -1)
    keys = Keys(torch.arange(DRAWS), torch.full((DRAWS,), 3))
    sample = sample_draft(
        draft,
        **battery.neutral(DRAWS),
        vocab_size=3,
        keys=keys,
        offset=0,
        mode=mode,
        vocab_map=vocab_map,
    )
    assert set(sample.token_ids.unique().tolist()) <= {1, 2, 4}
    one = torch.ones(DRAWS, dtype=torch.int64)
    dist = battery.ragged_dist(target.log().expand(2 * DRAWS, -1), one * 2)
    q = battery.keep_q([sample], vocab_map)
    drafts = Drafts(sample.token_ids[:, None], sample.is_delta[:, None], one, q)
    out = verify(dist, drafts, keys)
    battery.assert_fits(out.token_ids[:, 0], target)
    if verify is rejection and mode == "sample":
        expected = 0.3 + 0.1 + 0.2  # sum of min(p, q)
        assert abs(float(out.num_accepted.float().mean()) - expected) < 0.005


def greedy_with_softmax_q(chain, last, keys, num_drafts, mode, sampling, filters):
    """Greedy drafts handed over as if they had been sampled from the draft's softmax."""
    drafts = battery.propose(chain, last, keys, num_drafts, "greedy", sampling, filters)
    q, previous, samples = drafts.q, last, []
    for index, table in enumerate(chain.draft):
        logits = table[previous].log()
        samples.append(row_distribution(logits, **sampling, vocab_size=logits.shape[-1]))
        previous = drafts.token_ids[:, index]
    kept = {n: torch.stack([getattr(s, n) for s in samples], 1) for n in ("max", "cutoff", "lse")}
    return replace(drafts, is_delta=torch.zeros_like(drafts.is_delta), q=replace(q, **kept))


def softmax_residual(weights, draws):
    partial_mass = weights.sum(-1, keepdim=True) < 0.999
    return categorical(torch.where(partial_mass, weights.softmax(-1), weights), draws)


def constant_uniform(keys, purpose, offset, node=0):
    draws = real_uniform(keys, purpose, offset, node)
    return torch.zeros_like(draws) if purpose == Purpose.ACCEPT else draws


def one_stream(keys, purpose, offset, node=0):
    return real_uniform(keys, Purpose.ACCEPT, offset, node)


def drafter_stream(keys, purpose, offset, node=0):
    return real_uniform(keys, Purpose.DRAFT, offset, node)


def next_row(dist, num_positions):
    rows = real_position_rows(dist, num_positions)
    return rows if num_positions < 4 else (rows + 1).clamp(max=dist.argmax.shape[0] - 1)


real_uniform = rejection_module.uniform
real_position_rows = rejection_module.position_rows
FAULTS = [
    pytest.param("proposer", greedy_with_softmax_q, id="softmax-q-of-greedy-drafts"),
    pytest.param("categorical", softmax_residual, id="softmax-of-residual"),
    pytest.param("uniform", constant_uniform, id="constant-uniform"),
    pytest.param("uniform", one_stream, id="accept-and-recover-share-a-stream"),
    pytest.param("uniform", drafter_stream, id="rule-and-drafter-share-a-stream"),
    pytest.param("position_rows", next_row, id="recovered-from-the-next-row"),
]


@pytest.mark.parametrize(("where", "fault"), FAULTS)
def test_battery_catches(where, fault, monkeypatch):
    chain = random_chain(3, 3, seed=1)
    proposer = battery.propose
    if where == "proposer":
        proposer = fault
    else:
        monkeypatch.setattr(rejection_module, where, fault)
    out = decode(
        rejection,
        chain,
        num_requests=DRAWS,
        length=4,
        mode="sample",
        proposer=proposer,
        seed=11,
    )
    fits = joint_fits(out.tokens, chain.target)
    assert not fits[0].good, fits
    assert fits[0].p_value < 1e-12


@pytest.mark.parametrize("mode", ["greedy", "sample", "shared"])
@pytest.mark.parametrize("filters", [False, True], ids=["", "filters"])
def test_gumbel_equals_plain_sampling_token_for_token(mode, filters):
    chain = random_chain(50, 4, seed=3)
    sampling = {"temperature": torch.tensor([0.9])}
    if filters:
        sampling |= {"top_p": torch.tensor([0.9]), "top_k": torch.tensor([20])}
    none = Chain(chain.target, chain.draft[:0])
    common = {"num_requests": 2000, "length": 24, "sampling": sampling, "seed": 5}
    plain = decode(gumbel, none, mode=mode, proposer=no_drafts, **common)
    spec = decode(gumbel, chain, mode=mode, placeholders=True, **common)
    assert torch.equal(spec.tokens, plain.tokens)
    assert spec.accepted > 0
    fewer = Chain(chain.target, chain.draft[1:2])
    assert torch.equal(decode(gumbel, fewer, mode=mode, **common).tokens, plain.tokens)


def no_drafts(chain, last, keys, num_drafts, mode, sampling, filters):
    grid = torch.zeros(last.shape[0], 0, dtype=torch.int64)
    return Drafts(grid, grid.bool(), num_drafts)


def test_shared_noise_agrees_as_often_as_theory():
    """P(accept | y) = 1 / sum_x max(p_x / p_y, q_x / q_y), summed over y: 1 where p = q."""
    target = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draft = torch.tensor([0.4, 0.2, 0.3, 0.1])
    ratio = torch.maximum(target[None] / target[:, None], draft[None] / draft[:, None])
    expected = float((1 / ratio.sum(-1)).sum())
    same = float(torch.minimum(target, draft).sum())
    for q, rate in ((draft, expected), (target, 1.0)):
        chain = Chain(target.expand(4, -1), q.expand(1, 4, -1))
        out = decode(
            gumbel, chain, num_requests=100_000, length=1, mode="shared", ragged=False, seed=2
        )
        assert abs(out.accepted / out.drafted - rate) < 0.007
    assert expected < same < 1  # no coupling beats rejection sampling


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
@pytest.mark.parametrize(("verify", "mode"), [*SAMPLING_RULES, (greedy, "greedy")])
def test_greedy_limit(verify, mode, temperature):
    chain = random_chain(40, 3, seed=9)
    out = decode(
        verify,
        chain,
        num_requests=8,
        length=20,
        mode=mode,
        sampling={"temperature": torch.tensor([temperature])},
    )
    path, last = [], 0
    for _ in range(20):
        last = int(chain.target[last].argmax())
        path.append(last)
    assert out.tokens.tolist() == [path] * 8
