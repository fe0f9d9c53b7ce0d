"""Plans padded to a few shapes, so that a few CUDA graphs serve every step.

A step of verify rounds alone is *uniform*: every request has K + 1 rows, all of which want logits.
Any other step is *mixed* and takes the next larger number of rows, requests and logits rows.
What is missing goes to padding requests, whose slot never runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from specdec.schedule import Limits
from specdec.state import Plan


class Buckets(NamedTuple):
    """Sizes that plans are padded to, each in increasing order."""

    requests: tuple[int, ...]  # of uniform steps
    mixed_requests: tuple[int, ...]
    mixed_rows: tuple[int, ...]


def buckets(limits: Limits) -> Buckets:
    """Steps of few requests or rows are padded little; a larger step costs relatively less."""
    most = limits.max_num_seqs
    width = limits.max_draft_tokens + 1
    rows = limits.max_num_batched_tokens + most * width + 1
    return Buckets(
        requests=_up_to(most, (1, 2, 4, *range(8, 32, 8), *range(32, 128, 16))),
        mixed_requests=_up_to(most + 1, (9, 33, 65, 129)),
        mixed_rows=_up_to(rows, (16, 32, *range(64, 512, 64), *range(512, 1024, 128))),
    )


def _up_to(most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes below `most`, then doubling sizes, then `most` itself."""
    below = [size for size in sizes if size < most]
    size = 2 * sizes[-1]
    while size < most:
        below.append(size)
        size *= 2
    return (*below, most)


def pad(plan: Plan, limits: Limits, sizes: Buckets) -> Plan:
    """The plan with padding requests (of the last slot) up to one of the sizes."""
    width, slot = limits.max_draft_tokens + 1, limits.num_slots - 1
    if max(plan.query_lens) <= width and min(plan.num_logits) > 0:
        return uniform(plan, _next(sizes.requests, len(plan.slots)), width, slot)
    requests = _next(sizes.mixed_requests, len(plan.slots) + 1)
    missing = requests - len(plan.slots)
    rows = _next(sizes.mixed_rows, sum(plan.query_lens) + missing)
    return mixed(plan, requests, rows, requests * width, slot)


def plans(limits: Limits, sizes: Buckets) -> Iterator[Plan]:
    """Padding requests alone, one plan for each shape that `pad` can give; the largest first."""
    width, slot = limits.max_draft_tokens + 1, limits.num_slots - 1
    nothing = Plan(
        admissions=(),
        slots=(),
        query_lens=(),
        seq_lens=(),
        num_logits=(),
        new_blocks=(),
        preempted=(),
        num_draft_tokens=limits.max_draft_tokens,
        all_greedy=True,
        filters=False,
    )
    for requests in reversed(sizes.mixed_requests):
        for rows in reversed([rows for rows in sizes.mixed_rows if rows > requests]):
            yield mixed(nothing, requests, rows, requests * width, slot)
    for requests in reversed(sizes.requests):
        yield uniform(nothing, requests, width, slot)


def uniform(plan: Plan, num_requests: int, width: int, slot: int) -> Plan:
    """`num_requests` requests of `width` rows, all with logits."""
    missing = num_requests - len(plan.slots)
    widths = (width,) * num_requests
    return replace(
        plan,
        slots=(*plan.slots, *(slot,) * missing),
        query_lens=widths,
        seq_lens=(*plan.seq_lens, *(0,) * missing),
        num_logits=widths,
    )


def mixed(plan: Plan, num_requests: int, num_rows: int, num_logits: int, slot: int) -> Plan:
    """The last padding request, of which there is one at least, takes the rows that are left."""
    missing = num_requests - len(plan.slots)
    rows = num_rows - sum(plan.query_lens) - (missing - 1)
    logits = num_logits - sum(plan.num_logits)
    return replace(
        plan,
        slots=(*plan.slots, *(slot,) * missing),
        query_lens=(*plan.query_lens, *(1,) * (missing - 1), rows),
        seq_lens=(*plan.seq_lens, *(0,) * missing),
        num_logits=(*plan.num_logits, *(0,) * (missing - 1), logits),
    )


def _next(sizes: tuple[int, ...], size: int) -> int:
    return sizes[bisect_left(sizes, size)]
