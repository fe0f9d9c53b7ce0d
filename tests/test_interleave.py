"""Engines that take turns at the same requests."""

from types import SimpleNamespace

import pytest

from specdec.experiments import decoding


@pytest.mark.parametrize(
    ("num_requests", "num_engines", "turns"),
    [
        (4, 2, [(0, 4), (1, 4), (1, 4), (0, 4)]),  # one batch: all of it, in either order
        (3, 2, [(0, 3), (1, 3), (1, 3), (0, 3)]),
        (9, 2, [(0, 4), (1, 4), (1, 5), (0, 5)]),
        (12, 2, [(0, 4), (1, 4), (1, 4), (0, 4), (0, 4), (1, 4)]),
        (9, 1, [(0, 9)]),
    ],
)
def test_batches_are_full_and_orders_change(num_requests, num_engines, turns, monkeypatch):
    limits = SimpleNamespace(max_num_seqs=4)
    engines = [SimpleNamespace(limits=limits, index=index) for index in range(num_engines)]
    seen, clock, advanced = [], [0.0], []

    def generate(engine, requests, on_output):
        index = engine.index
        seen.append((index, len(requests)))
        clock[0] += len(requests) * (1 + index)
        for _ in requests:
            on_output(SimpleNamespace(finish_reason="length"))
        return [(index, request) for request in requests]

    monkeypatch.setattr(decoding, "generate", generate)
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: clock[0])
    requests = list(range(num_requests))
    results, seconds = decoding.interleave(engines, requests, lambda: advanced.append(1))
    assert seen == turns
    assert results == [[(index, r) for r in requests] for index in range(num_engines)]
    assert seconds == [num_requests * (1 + index) for index in range(num_engines)]  # each once
    assert len(advanced) == num_requests
