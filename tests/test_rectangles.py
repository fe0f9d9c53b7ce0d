"""Rectangles of requests: what the torch attention reads, made only where it runs."""

import random

import pytest
import torch
from running import requests, tiny_engine
from tiny import tiny_target

from specdec.kernels.runtime import using
from specdec.rectangles import attention_groups, length_class, rectangles
from specdec.schedule import Requests
from specdec.step import step_shape

BLOCK = 4


def lengths(count, seed):
    """Query and sequence lengths of requests in a plan's order."""
    rng = random.Random(seed)
    pairs = [(rng.choice([1, 4, 16, 17, 32, 33, 90]), rng.randint(0, 400)) for _ in range(count)]
    ordered = sorted(pairs, key=lambda x: (length_class(x[0]), x[0] + x[1]))
    return [query for query, _ in ordered], [query + before for query, before in ordered]


@pytest.mark.parametrize("seed", range(5))
def test_they_hold_every_request_once(seed):
    query_lens, seq_lens = lengths(150, seed)
    start = 0
    for size, max_query, max_seq in rectangles(query_lens, seq_lens):
        inside = slice(start, start + size)
        assert max_query == max(query_lens[inside])
        assert max_seq == max(seq_lens[inside])
        assert len({length_class(query) for query in query_lens[inside]}) == 1
        start += size
    assert start == 150


def test_where_they_end():
    assert rectangles([], []) == ()
    assert rectangles([1, 16, 17], [50, 60, 17]) == ((2, 16, 60), (1, 17, 17))
    few = [100] * 31 + [201]
    assert rectangles([1] * 32, few) == ((32, 1, 201),)
    assert rectangles([1] * 33, [100, *few]) == ((32, 1, 100), (1, 1, 201))
    assert rectangles([1] * 33, [101, *few]) == ((33, 1, 201),)


def test_every_row_sees_the_keys_up_to_its_own():
    query_lens, seq_lens = lengths(70, seed=9)
    query_start = torch.tensor([0, *query_lens]).cumsum(0)
    positions = torch.cat(
        [torch.arange(end - q, end) for q, end in zip(query_lens, seq_lens, strict=True)]
    )
    most = -(-max(seq_lens) // BLOCK)
    tables = torch.arange(70)[:, None] * most + torch.arange(most)
    sizes = rectangles(query_lens, seq_lens)
    assert len(sizes) > 3
    seen: set[int] = set()
    for group in attention_groups(sizes, query_start, positions, tables, BLOCK):
        for rows, blocks, mask in zip(*group, strict=True):
            request = int(torch.searchsorted(query_start, rows[0], right=True)) - 1
            own = range(query_start[request], query_start[request + 1])
            first, padding = rows[: len(own)], rows[len(own) :]
            assert first.tolist() == list(own)
            assert padding.eq(rows[0]).all()
            assert torch.equal(blocks, tables[request, : len(blocks)])
            assert torch.equal(mask.sum(-1), positions[rows] + 1)
            assert torch.equal(mask, mask.cummin(-1).values)
            assert not seen & set(own)
            seen |= set(own)
    assert len(seen) == len(positions)


def test_kernels_need_none():
    engine = tiny_engine(tiny_target())
    for request in requests([[3, 4, 5], list(range(3, 25)), [9]]):
        engine.add(request)
    books = Requests(engine.running, engine.waiting, engine.free_slots, engine.pool.free)
    plan = engine.stages.schedule(books, engine.limits)
    assert step_shape(plan).rectangles == ((2, 3, 6), (1, 22, 25))
    with using("triton"):
        assert step_shape(plan).rectangles == ()
