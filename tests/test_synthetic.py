"""The synthetic rule: the real rule's work, a made-up outcome."""

import math

import battery
import pytest
import torch
from running import requests, tiny_engine
from tiny import one_line_error, tiny_draft, tiny_target

from specdec.errors import ConfigError
from specdec.generate import generate
from specdec.keys import Keys
from specdec.propose.autoregressive import autoregressive
from specdec.state import Drafts
from specdec.verify import synthetic as module
from specdec.verify import traits_of
from specdec.verify.rejection import rejection
from specdec.verify.synthetic import synthetic

V, K = 11, 3


def case(num_requests=3, k=K):
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(num_requests * (k + 1), V, generator=rng)
    rows = torch.full((num_requests,), k + 1)
    dist = battery.ragged_dist(logits, rows, V, temperature=torch.ones(len(logits)))
    ids = torch.randint(0, V, (num_requests, k), generator=rng)
    pending = torch.full((num_requests,), k)
    drafts = Drafts(ids, torch.ones_like(ids, dtype=torch.bool), pending)
    return dist, drafts, Keys(torch.arange(num_requests), torch.full((num_requests,), 40))


@pytest.mark.parametrize("rule", module.RULES)
@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_exactly_so_many_stand(rule, accepted):
    dist, drafts, keys = case()
    record = synthetic(dist, drafts, keys, rule=rule, accepted=accepted)
    real = module.real_rule(rule)(dist, drafts, keys)
    assert record.num_accepted.tolist() == [accepted] * 3
    assert torch.equal(record.token_ids[:, :accepted], drafts.token_ids[:, :accepted])
    stop = real.token_ids.gather(1, real.num_accepted[:, None])[:, 0]
    assert torch.equal(record.token_ids[:, accepted], stop)
    assert (record.token_ids[:, accepted + 1 :] == -1).all()


def test_a_fraction_is_a_share_of_the_rounds():
    dist, drafts, keys = case(num_requests=4000)
    num = synthetic(dist, drafts, keys, accepted=1.25).num_accepted
    assert set(num.tolist()) == {1, 2}
    assert num.float().mean() == pytest.approx(1.25, abs=0.03)


def test_rates_are_chances_by_position():
    dist, drafts, keys = case(num_requests=4000)
    num = synthetic(dist, drafts, keys, rates=[0.8, 0.5]).num_accepted
    shares = [(num > j).float().mean().item() for j in range(K)]
    assert shares == pytest.approx([0.8, 0.4, 0.0], abs=0.03)
    again = synthetic(dist, drafts, keys, rates=[0.8, 0.5]).num_accepted
    assert torch.equal(num, again)


def test_the_rule_runs_in_full(monkeypatch):
    calls = []

    def watched(*args):
        calls.append(args)
        return rejection(*args)

    monkeypatch.setattr(module, "real_rule", lambda name: watched)
    step = case()
    synthetic(*step)
    assert calls == [step]


def test_it_is_declared_lossy():
    assert traits_of(synthetic).lossless is False


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"rule": "rejecton"}, r"^verify\.rule='rejecton' is not one of rejection"),
        ({"accepted": -1.0}, r"^verify\.accepted=-1\.0 must be a finite number of at least 0"),
        ({"accepted": math.nan}, r"^verify\.accepted=nan must be a finite number"),
        ({"accepted": math.inf}, r"^verify\.accepted=inf must be a finite number"),
        ({"rates": [0.5, 1.5]}, r"^verify\.rates has 1\.5; each must be from 0 to 1"),
    ],
)
def test_what_is_refused(keywords, match):
    step = case()
    one_line_error(lambda: synthetic(*step, **keywords), ConfigError, match)


@pytest.mark.parametrize("accepted", [1, 2])
def test_an_engine_commits_so_many_a_step(accepted):
    """Two random models: every full round keeps the same number of drafts."""
    target = tiny_target()

    def rule(dist, drafts, keys):
        return synthetic(dist, drafts, keys, accepted=accepted)

    engine = tiny_engine(target, tiny_draft(target), autoregressive, rule, k=K, eos=())
    for result in generate(engine, requests([[7, 3, 60], [11]], max_tokens=20)):
        assert len(result.token_ids) == 20
        assert {r.committed for r in result.rounds[:-1]} == {accepted + 1}
