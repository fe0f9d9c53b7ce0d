"""Engines that take turns at the same requests."""

import pytest
from battery import random_chain
from running import tiny_engine
from test_engine import markov_target

from specdec.errors import RequestError
from specdec.experiments import decoding
from specdec.generate import generate
from specdec.propose.ngram import ngram
from specdec.propose.none import none
from specdec.schedule import Request

CHAIN = random_chain(vocab_size=8, num_drafts=3, seed=1)


def engines(max_num_seqs=4):
    keywords = {"max_num_seqs": max_num_seqs, "eos": (7,)}
    return [
        tiny_engine(markov_target(CHAIN), None, ngram, k=2, **keywords),
        tiny_engine(markov_target(CHAIN), None, none, k=0, **keywords),
    ]


def requests_of(num):
    return [
        Request((1, 2 + index % 4), max_tokens=6 + index % 5, temperature=1.0, seed=index)
        for index in range(num)
    ]


@pytest.mark.parametrize("num_requests", [1, 3, 4, 9])
@pytest.mark.parametrize("turn_seconds", [0.0, 0.003, 100.0])
def test_an_engine_runs_as_if_it_were_alone(num_requests, turn_seconds, monkeypatch):
    """The same results in the same steps, full batches all the way, whoever else has turns."""
    monkeypatch.setattr(decoding, "TURN_SECONDS", turn_seconds)
    requests = requests_of(num_requests)
    steps, order, done = [], [], []

    def counted(engine, index, run):
        def step():
            steps[index] += 1
            order.append(index)
            return run()

        engine.step = step

    for together in (False, True):
        pair = engines()
        steps[:] = [0, 0]
        order.clear()
        for index, engine in enumerate(pair):
            counted(engine, index, engine.step)
        if together:
            results, stints = decoding.interleave(pair, requests, lambda: done.append(1))
            assert len(done) == num_requests
            for own, turns in zip(results, stints, strict=True):
                assert all(0 < r.seconds <= sum(turn.seconds for turn in turns) for r in own)
                assert sum(turn.tokens for turn in turns) == sum(len(r.token_ids) for r in own)
        else:
            results = [generate(engine, requests) for engine in pair]
            alone, alone_steps = results, list(steps)
    assert steps == alone_steps
    assert [[r.token_ids for r in own] for own in results] == [
        [r.token_ids for r in own] for own in alone
    ]
    if turn_seconds == 0.0:
        assert order[:4] == [0, 1, 0, 1]
    if turn_seconds == 100.0:
        assert order == sorted(order)


def test_time_is_that_of_an_engines_own_turns(monkeypatch):
    """Also a result's: what passes while another engine runs is not its own."""
    monkeypatch.setattr(decoding, "TURN_SECONDS", 0.0)
    now = [0.0]
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: now[0])
    pair = engines()
    for engine, cost in zip(pair, (1.0, 10.0), strict=True):

        def step(run=engine.step, cost=cost):
            now[0] += cost
            return run()

        engine.step = step
    results, stints = decoding.interleave(pair, requests_of(1))
    seconds = [sum(turn.seconds for turn in turns) for turns in stints]
    assert seconds[0] + seconds[1] == now[0]
    assert seconds[1] % 10 == 0
    assert seconds[0] < 10
    assert results[0][0].seconds <= seconds[0]


def test_a_request_that_does_not_fit_stops_both():
    with pytest.raises(RequestError):
        decoding.interleave(engines(), [Request(tuple([1] * 500), max_tokens=4)])
