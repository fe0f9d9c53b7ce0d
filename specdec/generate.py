"""Requests run to their end by an engine."""

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from specdec.engine import Engine, Output, Round
from specdec.schedule import Request


@dataclass(frozen=True)
class Result:
    """A finished request. `token_ids` end with the end-of-sequence id when that ended it."""

    request_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...]
    seconds: float


def generate(
    engine: Engine,
    requests: Iterable[Request],
    on_output: Callable[[Output], None] | None = None,
) -> list[Result]:
    """Run requests to their end with continuous batching; results in the order of the requests.

    `seconds` of a result run from its first token's step to its last. Raises RequestError before
    any is queued.
    """
    steps = stepwise(engine, requests, on_output)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def stepwise(
    engine: Engine,
    requests: Iterable[Request],
    on_output: Callable[[Output], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Generator[None, None, list[Result]]:
    """`generate`, pausing after every step; the results are what the generator returns.

    Args:
        clock: seconds by which results are timed.
    """
    requests = list(requests)
    for request in requests:
        engine.check(request)
    ids = [(engine.add(request), request) for request in requests]
    tokens: dict[int, list[int]] = {i: [] for i, _ in ids}
    rounds: dict[int, list[Round]] = {i: [] for i, _ in ids}
    first: dict[int, float] = {}
    ended: dict[int, tuple[str, float]] = {}
    while engine.has_unfinished:
        began = clock()
        for output in engine.step():
            first.setdefault(output.request_id, began)
            tokens[output.request_id].extend(output.token_ids)
            if output.round is not None:
                rounds[output.request_id].append(output.round)
            if output.finish_reason:
                ended[output.request_id] = (output.finish_reason, clock())
            if on_output is not None:
                on_output(output)
        yield
    return [
        Result(
            request_id=i,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(tokens[i]),
            finish_reason=ended[i][0],
            rounds=tuple(rounds[i]),
            seconds=ended[i][1] - first[i],
        )
        for i, request in ids
    ]
