"""Penalties count what plain decoding would have counted, whoever drafts."""

import json
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from battery import fit, joint_ids, random_chain
from drafters import mixed, oracle, scripted
from running import tiny_engine
from scripts import call, tiny_job
from test_engine import markov_draft, markov_target
from tiny import logits as logits_of
from tiny import tiny_draft, tiny_target
from transformers import RepetitionPenaltyLogitsProcessor

from specdec import runner as runner_module
from specdec.errors import ConfigError, RequestError
from specdec.experiments import acceptance
from specdec.generate import generate
from specdec.propose.autoregressive import autoregressive
from specdec.propose.ngram import ngram
from specdec.propose.none import none
from specdec.schedule import Request
from specdec.values import PENALTIES
from specdec.verify.delta import delta
from specdec.verify.gumbel import gumbel

ASKED = [
    ([5, 9, 11], {"repetition_penalty": 1.4}),
    (list(range(3, 30)), {"presence_penalty": 0.8, "frequency_penalty": 0.3}),
    ([7] * 9, {}),
    ([50, 60, 70, 80], {"repetition_penalty": 0.8, "frequency_penalty": -0.4}),
    (
        [4, 4, 5, 5, 4, 4, 5],
        {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 1.0},
    ),
]
LENGTH = 20


def asked(max_tokens=LENGTH, **keywords):
    return [
        Request(tuple(prompt), max_tokens=max_tokens, ignore_eos=True, **keywords, **penalties)
        for prompt, penalties in ASKED
    ]


def texts(target, draft=None, propose=none, requests=None, **options):
    engine = tiny_engine(target, draft, propose, penalties=True, **options)
    results = generate(engine, requests or asked())
    assert len(engine.free_slots) == engine.limits.max_num_seqs
    return [r.token_ids for r in results], results, engine


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def plain(target):
    return texts(target)[0]


def one_by_one(target, request):
    """No cache and no engine: the whole text again for each token, and transformers' processor."""
    text, output = list(request.prompt_ids), []
    repetition = RepetitionPenaltyLogitsProcessor(request.repetition_penalty)
    while len(output) < request.max_tokens:
        scores = logits_of(target, text)[-1:, : target.vocab_size].float()
        scores = repetition(torch.tensor([text]), scores)[0]
        for token in set(output):
            times = output.count(token)
            scores[token] -= request.presence_penalty + request.frequency_penalty * times
        output.append(int(scores.argmax()))
        text.append(output[-1])
    return tuple(output)


def test_plain_decoding_equals_transformers(target, plain):
    assert plain == [one_by_one(target, request) for request in asked()]
    off = {name: penalty.off for name, penalty in PENALTIES.items()}
    without = [replace(request, **off) for request in asked()]
    unpenalised = texts(target, requests=without)[0]
    changed = [a != b for a, b in zip(plain, unpenalised, strict=True)]
    assert changed == [bool(penalties) for _, penalties in ASKED]


DRAFTERS = {
    "head": {"propose": autoregressive},
    "sampled head": {"propose": autoregressive, "draft_sampling": "sample"},
    "ngram": {"propose": ngram, "min_ngram": 1, "max_ngram": 3},
    "oracle": {"propose": oracle},
    "sometimes right": {"propose": mixed},
}


def options_of(name, plain):
    """The options of a drafter; those that look the answer up are given it."""
    options = dict(DRAFTERS[name])
    if options["propose"] in (oracle, mixed):
        known = {tuple(p): [*p, *ids] for (p, _), ids in zip(ASKED, plain, strict=True)}
        options["propose"] = scripted(known, 101, options["propose"])
    return options


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("batch", [1, 5])
def test_speculation_equals_plain(target, plain, name, batch):
    options = options_of(name, plain)
    ids, results, _ = texts(target, tiny_draft(target), max_num_seqs=batch, **options)
    assert ids == plain
    rounds = [r for result in results for r in result.rounds]
    if name == "oracle":
        assert all(r.accepted == min(r.drafted, r.committed) for r in rounds)
        assert max(r.accepted for r in rounds) == 3
    if name != "head" and name != "sampled head":
        assert sum(r.accepted for r in rounds) > 0


@pytest.mark.parametrize("rule", [delta, gumbel])
def test_other_rules_equal_plain(target, plain, rule):
    options = options_of("sometimes right", plain)
    assert texts(target, verify=rule, **options)[0] == plain


@pytest.mark.parametrize("name", ["head", "oracle"])
def test_steps_launched_ahead_equal_plain(target, plain, name):
    """And prompts in chunks."""
    options = options_of(name, plain) | {"overlap": True, "max_num_batched_tokens": 7}
    assert texts(target, tiny_draft(target), **options)[0] == plain


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_equals_plain(target, plain, overlap):
    """A request that comes back has its own output counted, in a slot that another had."""
    options = options_of("sometimes right", plain)
    options |= {"overlap": overlap, "num_blocks": 20, "max_model_len": 60}
    ids, _, engine = texts(target, tiny_draft(target), **options)
    assert engine.num_preemptions > 0
    assert ids == plain


def test_slots_are_counted_anew(target, plain):
    engine = tiny_engine(target, penalties=True, max_num_seqs=1)
    for _ in range(2):
        assert [generate(engine, [r])[0].token_ids for r in asked()[::-1]] == plain[::-1]


def test_sampled_neighbours_leave_greedy_rows_alone(target, plain):
    hot = asked(temperature=1.0, top_p=0.9, seed=3)
    both = [r for pair in zip(hot, asked(), strict=True) for r in pair]
    options = {"propose": autoregressive, "draft_sampling": "sample"}
    assert texts(target, tiny_draft(target), requests=both, **options)[0][1::2] == plain


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_gumbel_equals_plain_sampling(target, mode):
    """Token for token, since each draw is the target's own."""
    hot = asked(temperature=1.3, top_p=0.95, seed=4)
    want = texts(target, verify=gumbel, requests=hot)[0]
    options = {"propose": autoregressive, "draft_sampling": mode, "verify": gumbel}
    assert texts(target, tiny_draft(target), requests=hot, **options)[0] == want


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "overlap"), [("ngram", True), pytest.param("head", False, marks=pytest.mark.slow)]
)
def test_padded_steps_on_kernels_equal_plain(target, plain, name, overlap, monkeypatch):
    """As the graphs run them, in the interpreter: requests with penalties come and go."""
    monkeypatch.setattr(runner_module, "graphed", lambda fn, args, pool: fn)
    options = options_of(name, plain) | {
        "overlap": overlap,
        "kernels": "triton",
        "max_num_batched_tokens": 16,
    }
    engine = tiny_engine(target, tiny_draft(target), penalties=True, max_num_seqs=2, **options)
    engine.runner.graphs = True
    few = [0, 4, 2]
    results = generate(engine, [replace(asked()[i], max_tokens=4) for i in few])
    assert [r.token_ids for r in results] == [plain[i][:4] for i in few]
    kinds = {(s.all_greedy, s.filters, s.penalties) for s in engine.runner.steps}
    assert kinds == {(True, False, True), (True, False, False)}


def exact_joint(table, request, length):
    """Probabilities [V ** length] fp64 of the first tokens after the prompt, by enumeration."""
    joint = []
    for tokens in product(range(len(table)), repeat=length):
        text, probability = list(request.prompt_ids), 1.0
        for index, token in enumerate(tokens):
            row = table[text[-1]].double()
            for seen in set(text):
                by = request.repetition_penalty
                row[seen] = row[seen] / by if row[seen] > 0 else row[seen] * by
            for said in set(tokens[:index]):
                times = tokens[:index].count(said)
                row[said] -= request.presence_penalty + request.frequency_penalty * times
            probability *= float(row.softmax(-1)[token])
            text.append(token)
        joint.append(probability)
    return torch.tensor(joint, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["sample", "greedy"])
@pytest.mark.parametrize("draws", [4_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_rejection_emits_the_penalised_distribution(mode, draws):
    """Joint of four tokens over several rounds; the head drafts from unpenalised logits."""
    chain = random_chain(vocab_size=4, num_drafts=3, seed=11)
    chain = chain._replace(target=chain.target * math.e**1.5)  # logits of both signs
    engine = tiny_engine(
        markov_target(chain),
        markov_draft(chain),
        autoregressive,
        k=3,
        draft_sampling=mode,
        max_num_seqs=2000,
        max_num_batched_tokens=8000,
        max_model_len=12,
        num_blocks=8001,
        eos=(),
        penalties=True,
    )
    request = Request(
        (2, 0),
        max_tokens=5,
        temperature=1.0,
        repetition_penalty=1.6,
        presence_penalty=0.4,
        frequency_penalty=0.5,
    )
    results = generate(engine, [replace(request, seed=s) for s in range(draws)])
    ids = joint_ids(torch.tensor([r.token_ids for r in results])[:, :4], 4)
    assert fit(ids, exact_joint(chain.target.log(), request, 4)).good
    free = replace(request, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    assert not fit(ids, exact_joint(chain.target.log(), free, 4)).good
    assert sum(r.accepted for result in results for r in result.rounds) > draws / 2


BAD = [
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": float("inf")},
    {"presence_penalty": 2.1},
    {"presence_penalty": float("nan")},
    {"frequency_penalty": -2.1},
]


@pytest.mark.parametrize("penalties", BAD, ids=str)
def test_a_penalty_out_of_range_is_refused(target, penalties):
    engine = tiny_engine(target, penalties=True)
    (name,) = penalties
    with pytest.raises(RequestError, match=f"{name}=.* must be from"):
        engine.add(Request((1, 2), **penalties))
    assert not engine.has_unfinished


def test_the_ends_of_the_ranges_are_served(target):
    """Not one logit overflows."""
    ends = [{name: value} for name, (_, low, high) in PENALTIES.items() for value in (low, high)]
    results = texts(target, requests=[Request((5, 9), max_tokens=3, **e) for e in ends])[1]
    assert {r.finish_reason for r in results} <= {"length", "stop"}


def test_counts_are_reserved_only_when_they_are_asked_for(target):
    engine = tiny_engine(target)
    assert engine.state.token_counts.numel() == 0
    with pytest.raises(RequestError, match=r"presence_penalty=0\.5 .*penalties=true"):
        engine.add(Request((1, 2), presence_penalty=0.5))
    assert tiny_engine(target, penalties=True).state.token_counts.shape == (9, 101)


def test_a_schedule_that_forgets_penalties_is_refused(target):
    engine = tiny_engine(target, penalties=True)
    plan = engine.stages.schedule
    engine.stages = engine.stages._replace(
        schedule=lambda *args: replace(plan(*args), penalties=False)
    )
    engine.add(Request((1, 2)))
    engine.step()
    engine.add(Request((1, 2), frequency_penalty=0.5))
    with pytest.raises(ConfigError, match="penalties=True"):
        engine.step()


def test_a_job_with_penalties(tmp_path, monkeypatch):
    """Under so large a penalty no token comes twice while another has a positive logit."""
    more = ["propose=ngram", "sampling.repetition_penalty=1000", "sampling.ignore_eos=true"]
    argv = [*tiny_job(tmp_path), *more, "logger=none", f"hydra.run.dir={tmp_path / 'run'}"]
    assert call(acceptance.main, argv, monkeypatch) == 0
    lines = (tmp_path / "run" / "outputs.jsonl").read_text().splitlines()
    for ids in [json.loads(line)["token_ids"] for line in lines]:
        assert len(set(ids)) == len(ids) == 12
