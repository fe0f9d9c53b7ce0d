"""How long an engine's steps take, and where the time goes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from specdec.engine import Engine, Output
from specdec.kernels.stamps import Stamps, stamp_
from specdec.models.batch import Target
from specdec.schedule import Request
from specdec.step import Stages
from specdec.verify import traits_of

SETTLE = 5  # full steps that are not counted
EDGE = 0.15  # share of a run's stamped steps dropped at either end: prefills and the last rounds
FORWARD, LOGITS, VERIFIED, PROPOSE, PROPOSED = range(5)  # stamps of a step in order
PARTS = ("target", "verification", "postprocess", "drafting")


class Pass(NamedTuple):
    """Requests that started together, decoded to their end."""

    intervals: list[float]  # seconds between the ends of consecutive full steps
    tokens_per_step: float  # of one request in those steps
    num_tokens: int  # of the whole pass
    seconds: float  # of the whole pass, prefill included


class Arrivals(NamedTuple):
    """Requests that arrived by chance, over the time after the first of them and before the last
    of them were there."""

    tokens_per_second: float
    mean_batch: float
    seconds: float


class Trace(NamedTuple):
    """What a profiler saw of some steps."""

    idle_share: float  # of the window: no kernel and no copy runs
    busy_ms: float  # a step
    num_kernels: float  # a step
    kernels: list[dict[str, Any]]  # the longest, by name: ms and calls a step


def random_requests(
    num: int, vocab_size: int, prompt_tokens: int, *, seed: int = 0, **keywords: Any
) -> list[Request]:
    """Prompts of random ids; keywords of `Request`. Nothing ends a request before its limit."""
    rng = random.Random(seed)
    return [
        Request(
            tuple(rng.randrange(vocab_size) for _ in range(prompt_tokens)),
            ignore_eos=True,
            **{**keywords, "seed": keywords.get("seed", 0) + index},
        )
        for index in range(num)
    ]


def lockstep(
    engine: Engine,
    requests: Sequence[Request],
    on_full_step: Callable[[int], None] = lambda index: None,
) -> Pass:
    """Decode requests that start together.

    A full step is one in which every request had a verify round and goes on.

    Args:
        on_full_step: called with the number of the full step that was just read.
    """
    for request in requests:
        engine.add(request)
    began = last = time.perf_counter()
    intervals, rounds, committed, num_tokens, num_full = [], 0, 0, 0, 0
    was_full = False
    while engine.has_unfinished:
        outputs = engine.step()
        now = time.perf_counter()
        num_tokens += sum(len(output.token_ids) for output in outputs)
        full = len(outputs) == len(requests) and all(map(_goes_on, outputs))
        if full:
            num_full += 1
            if was_full:
                intervals.append(now - last)
            rounds += len(outputs)
            committed += sum(len(output.token_ids) for output in outputs)
            on_full_step(num_full)
        last, was_full = now, full
    kept = intervals[SETTLE:] or intervals
    return Pass(kept, committed / max(rounds, 1), num_tokens, time.perf_counter() - began)


def _goes_on(output: Output) -> bool:
    return output.round is not None and output.finish_reason is None


def arrive(engine: Engine, requests: Sequence[Request], rate: float, *, seed: int = 0) -> Arrivals:
    """Serve requests that arrive as a Poisson process of `rate` requests a second.

    The window opens when a fifth of them has arrived and closes at the last arrival.
    """
    rng = random.Random(seed)
    due, at = [], 0.0
    for _ in requests:
        at += rng.expovariate(rate)
        due.append(at)
    opens = due[len(due) // 5]
    added = finished = tokens = 0
    area = 0.0  # requests times seconds
    began = time.perf_counter()
    last = 0.0
    first_seen: float | None = None
    while added < len(requests):
        now = time.perf_counter() - began
        while added < len(requests) and due[added] <= now:
            engine.add(requests[added])
            added += 1
        if not engine.has_unfinished:
            time.sleep(max(0.0, due[added] - now) if added < len(requests) else 0.0)
            last = time.perf_counter() - began
            continue
        outputs = engine.step()
        now = time.perf_counter() - began
        if last >= opens:
            first_seen = last if first_seen is None else first_seen
            tokens += sum(len(output.token_ids) for output in outputs)
            area += (added - finished) * (now - last)
        finished += sum(output.finish_reason is not None for output in outputs)
        last = now
    seconds = last - (opens if first_seen is None else first_seen)
    while engine.has_unfinished:
        engine.step()
    seconds = max(seconds, 1e-9)
    return Arrivals(tokens / seconds, area / seconds, seconds)


def stamped_target(target: Target, stamps: Stamps) -> Target:
    """The target with stamps before its forward pass and behind its logits."""
    capture = target.capture

    def forward(*args: Any) -> Any:
        stamp_(stamps, FORWARD)
        return target.forward(*args)

    def logits(*args: Any) -> Any:
        out = target.logits(*args)
        stamp_(stamps, LOGITS)
        return out

    def captured(ids: tuple[int, ...]) -> Target:
        assert capture is not None
        return stamped_target(capture(ids), stamps)

    return target._replace(
        forward=forward, logits=logits, capture=None if capture is None else captured
    )


def stamped_stages(stages: Stages, stamps: Stamps) -> Stages:
    """The stages with stamps behind verification and around drafting."""

    def verify(*args: Any) -> Any:
        out = stages.verify(*args)
        stamp_(stamps, VERIFIED)
        return out

    def propose(*args: Any, **keywords: Any) -> Any:
        stamp_(stamps, PROPOSE)
        out = stages.propose(*args, **keywords)
        stamp_(stamps, PROPOSED)
        return out

    verify.traits = traits_of(stages.verify)  # type: ignore[attr-defined]
    return stages._replace(verify=verify, propose=propose)


def part_seconds(marks: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Median time of each part of a step, and of all else, from its stamps.

    The target ends with its logits; what turns them into a distribution is verification. `rest` is
    from the end of drafting to the next step's target: commit, preparation, whatever idles between.
    """
    starts = [index for index, (mark, _) in enumerate(marks) if mark == FORWARD]
    whole = [
        [at for _, at in marks[a : b + 1]]
        for a, b in pairwise(starts)
        if [mark for mark, _ in marks[a:b]] == list(range(5))
    ]
    cut = int(len(whole) * EDGE)
    whole = whole[cut : len(whole) - cut]
    if not whole:
        return {}
    columns = list(zip(*whole, strict=True))
    spans = pairwise(columns)
    medians = [
        statistics.median(end - start for start, end in zip(a, b, strict=True)) * 1e-9
        for a, b in spans
    ]
    return dict(zip((*PARTS, "rest"), medians, strict=True))


def traced(engine: Engine, requests: Sequence[Request], num_steps: int) -> Trace | None:
    """Profile up to `num_steps` full steps on a GPU; None where the profiler saw no kernel."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    first = last = 0

    def on_full_step(index: int) -> None:
        # a step may be in flight: waiting here makes whole steps of what is profiled
        nonlocal first, last
        if index == SETTLE:
            torch.cuda.synchronize()
            profile.start()
            first = last = index
        elif first and last < first + num_steps:
            last = index
            if last == first + num_steps:
                torch.cuda.synchronize()
                profile.stop()

    lockstep(engine, requests, on_full_step)
    if not first or last == first:
        return None
    if last < first + num_steps:
        torch.cuda.synchronize()
        profile.stop()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.endswith(" Sync")  # the host's waits, where they are recorded
    ]
    return trace(spans, last - first) if spans else None


def trace(spans: Sequence[tuple[str, float, float]], num_steps: int, longest: int = 40) -> Trace:
    """The record of (name, start, end) spans in microseconds; they may overlap."""
    ordered = sorted(spans, key=lambda span: span[1])
    busy, reached = 0.0, ordered[0][1]
    for _, start, end in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    window = reached - ordered[0][1]
    totals: dict[str, list[float]] = {}
    for name, start, end in ordered:
        total = totals.setdefault(name, [0.0, 0])
        total[0] += end - start
        total[1] += 1
    by_time = sorted(totals.items(), key=lambda item: -item[1][0])[:longest]
    return Trace(
        idle_share=1 - busy / window if window else 0.0,
        busy_ms=busy / num_steps / 1e3,
        num_kernels=len(spans) / num_steps,
        kernels=[
            {"name": name[:120], "ms": total / num_steps / 1e3, "calls": calls / num_steps}
            for name, (total, calls) in by_time
        ],
    )
