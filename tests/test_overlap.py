"""Steps launched before the last one was read, and steps padded to few shapes, change nothing."""

from functools import partial

import pytest
import torch
from running import requests, tiny_engine
from tiny import tiny_draft, tiny_target

from specdec import runner as runner_module
from specdec.generate import generate
from specdec.kernels.runtime import using
from specdec.padding import buckets, pad, plans
from specdec.propose.autoregressive import autoregressive
from specdec.propose.ngram import ngram
from specdec.propose.none import none
from specdec.schedule import Limits, Requests
from specdec.state import FinishReason, Plan
from specdec.step import step_shape

PROPOSERS = {"head": autoregressive, "ngram": partial(ngram, min_ngram=1), "plain": none}


def asked():
    return [
        *requests([[7, 3, 60, 2, 9, 9, 41], [11], [4, 4, 4, 4, 4, 4]], max_tokens=13),
        *requests([list(range(3, 40))], max_tokens=9, temperature=1.0, top_p=0.9, seed=3),
        *requests([[5, 5, 5, 5, 5, 5]], max_tokens=1),
        *requests([[8, 9, 10]], max_tokens=30, temperature=0.7, top_k=5, seed=5, ignore_eos=True),
    ]


def engine_of(propose, **keywords):
    target = tiny_target()
    keywords = {"max_num_batched_tokens": 16, "draft_sampling": "sample", **keywords}
    k = 0 if propose is none else 3
    return tiny_engine(target, tiny_draft(target), propose, k=k, **keywords)


def few():
    return [
        *requests([[7, 3, 60, 2, 9]], max_tokens=6),
        *requests([[5, 5, 5, 5, 5]], max_tokens=4, temperature=1.0, top_p=0.9, seed=3),
    ]


def texts(engine, asked=asked):
    return [(r.token_ids, r.finish_reason, r.rounds) for r in generate(engine, asked())]


@pytest.mark.parametrize("name", PROPOSERS)
def test_overlap_gives_the_same_rounds(name):
    propose = PROPOSERS[name]
    assert texts(engine_of(propose, overlap=True)) == texts(engine_of(propose))


@pytest.mark.parametrize("num_blocks", [16, 20])
def test_overlap_with_too_few_blocks(num_blocks):
    """Requests whose tokens are in flight are preempted and come back."""
    tight = {"max_model_len": 50, "num_blocks": num_blocks, "block_size": 4}
    engine = engine_of(autoregressive, overlap=True, **tight)
    got = texts(engine)
    assert engine.num_preemptions
    assert [tokens for tokens, _, _ in got] == [
        tokens for tokens, _, _ in texts(engine_of(autoregressive, max_model_len=50))
    ]
    assert len(engine.pool.free) == num_blocks - 1
    assert len(engine.free_slots) == 8


def test_an_outcome_comes_one_step_late():
    engine = engine_of(autoregressive, overlap=True)
    engine.add(asked()[0])
    assert engine.step() == []
    (first,) = engine.step()
    assert len(first.token_ids) == 1
    assert first.round is None
    assert engine.step()[0].round.drafted == 3


def test_an_abort_while_a_step_is_in_flight():
    """Its slot and blocks serve the next request, which is not given its tokens."""
    engine = engine_of(autoregressive, overlap=True, max_num_seqs=1)
    dropped = engine.add(asked()[0])
    engine.step()
    engine.step()
    engine.abort(dropped)
    kept = engine.add(asked()[1])
    tokens = []
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id == kept
            tokens.extend(output.token_ids)
    (alone,) = generate(engine_of(autoregressive), [asked()[1]])
    assert tuple(tokens) == alone.token_ids


def test_a_request_that_ended_unread_commits_nothing():
    """Its rows in the next step are padding: state and the count of committed tokens stand."""
    engine = engine_of(autoregressive, overlap=True, eos=())
    engine.add(requests([[7, 3, 60]], max_tokens=40)[0])
    engine.step()
    slot = engine.running[0].slot
    engine.state.finish_reason[slot] = int(FinishReason.STOP)
    before = engine.state.token_ids[slot].clone(), engine.state.num_tokens[slot].item()
    engine.step()
    engine.step()
    length = before[1]
    assert engine.state.num_tokens[slot] == length
    assert torch.equal(engine.state.token_ids[slot, :length], before[0][:length])
    assert engine.state.finish_reason[slot] == int(FinishReason.STOP)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        ("plain", False),
        ("head", True),
        *(
            pytest.param(name, overlap, marks=pytest.mark.slow)
            for name, overlap in (("head", False), ("ngram", False), ("ngram", True))
        ),
    ],
)
def test_padded_steps_give_the_same_rounds(name, overlap, monkeypatch):
    """As the graphs run them, in the interpreter: few shapes, whatever arrives and departs."""
    captured = []
    monkeypatch.setattr(
        runner_module, "graphed", lambda fn, args, pool: captured.append(fn(*args)) or fn
    )
    propose = PROPOSERS[name]
    engine = engine_of(propose, kernels="triton", overlap=overlap)
    engine.runner.graphs = True
    assert texts(engine, few) == texts(engine_of(propose), few)
    sizes = {(s.num_requests, s.num_rows) for s in engine.runner.steps}
    assert len(captured) == len(engine.runner.steps)
    assert len(sizes) <= 7


def test_plans_are_padded_to_the_next_size():
    limits = Limits(20, 64, 128, 4, 400, 3)
    sizes = buckets(limits)
    assert sizes.requests == (1, 2, 4, 8, 16, 20)
    engine = engine_of(autoregressive)
    for request in asked():
        engine.add(request)
    books = Requests(engine.running, engine.waiting, engine.free_slots, engine.pool.free)
    plan = engine.stages.schedule(books, engine.limits)
    padded = pad(plan, limits, sizes)
    assert len(padded.slots) in sizes.mixed_requests
    assert sum(padded.query_lens) in sizes.mixed_rows
    assert sum(padded.num_logits) == 4 * len(padded.slots)
    assert set(padded.slots[len(plan.slots) :]) == {20}
    assert min(padded.query_lens) >= 1
    assert len(padded.seq_lens) == len(padded.slots)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 7])
def test_every_step_has_a_shape_that_warm_up_captured(max_num_seqs):
    """Also where the padding request gets as many rows as the others, by chance."""
    limits = Limits(max_num_seqs, 64, 128, 4, 400, 3)
    sizes = buckets(limits)

    def plan(lens, num_logits):
        slots = tuple(range(len(lens)))
        return Plan((), slots, lens, lens, num_logits, (), (), 3, True, False)

    with using("triton"):
        captured = {step_shape(p) for p in plans(limits, sizes)}
        for length in range(1, 64 // max_num_seqs + 1):
            for count in range(1, max_num_seqs + 1):
                for num_logits in (0, 1, min(length, 4)):
                    asked = plan((length,) * count, (num_logits,) * count)
                    assert step_shape(pad(asked, limits, sizes)) in captured
