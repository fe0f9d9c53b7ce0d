"""Each op's time from a CUDA graph beside the floor that its bytes set.

    python -m specdec.kernels.bench [op ...] [--json FILE]

An op is a folder with a `bench.py` that has `cases(device) -> list[Case]`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parent
WARMUP = 3  # runs before a capture: kernels compile, libraries take their workspaces
REPLAY_SECONDS = 1e-3  # of work in one graph, so that the host stays ahead of the device
MAX_REPEATS = 64
ROUNDS = 30


class Case(NamedTuple):
    """One shape of an op; inputs are random and rotate where a step would not find them cached."""

    name: str
    run: Callable[[], object]  # can be captured in a graph
    num_bytes: int  # that any implementation has to read and write
    baseline: Callable[[], object] | None = None  # timed in turn with `run`


class Timing(NamedTuple):
    """Medians of one case; `fraction` is the floor's share of the time."""

    op: str
    case: str
    microseconds: float
    num_bytes: int
    floor_microseconds: float
    fraction: float
    baseline_microseconds: float | None


HEADER = (
    f"{'op':<16} {'case':<44} {'µs':>9} {'MB':>9} {'floor µs':>9} {'of floor':>8} {'base µs':>9}"
)


def has_gpu(who: str) -> bool:
    """Whether there is one; where not, says on stderr `who` times something that needs it."""
    if not torch.cuda.is_available():
        print(f"{who} on a GPU and torch sees none here", file=sys.stderr)
    return torch.cuda.is_available()


def ops() -> list[str]:
    """Names of the ops that have a bench."""
    return sorted(path.parent.name for path in ROOT.glob("*/bench.py"))


def timing(op: str, case: Case, seconds: Sequence[float], bandwidth: float) -> Timing:
    """The record of one case.

    Args:
        seconds: of `run` and, where the case has one, of its baseline.
        bandwidth: bytes a second.
    """
    own, *others = (s * 1e6 for s in seconds)
    floor = case.num_bytes / bandwidth * 1e6
    baseline = others[0] if others else None
    return Timing(op, case.name, own, case.num_bytes, floor, floor / own, baseline)


def line(row: Timing) -> str:
    """One row of the printed table."""
    baseline = "-" if row.baseline_microseconds is None else f"{row.baseline_microseconds:.2f}"
    return (
        f"{row.op:<16} {row.case:<44} {row.microseconds:>9.2f} {row.num_bytes / 1e6:>9.2f} "
        f"{row.floor_microseconds:>9.2f} {row.fraction:>8.2f} {baseline:>9}"
    )


def captured(run: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of about a millisecond, and how many times it holds `run`."""
    graph = _graph(run, 1)
    once = replay_seconds([graph], rounds=5)[0]
    repeats = max(1, min(MAX_REPEATS, round(REPLAY_SECONDS / once)))
    if repeats > 1:
        graph.reset()
        graph = _graph(run, repeats)
    return graph, repeats


def _graph(run: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return graph


def replay_seconds(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int = ROUNDS) -> list[float]:
    """Median time of a replay of each graph, the graphs taking turns."""
    stamps: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for _ in range(rounds + 1):
        for graph, pairs in zip(graphs, stamps, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            pairs.append((start, end))
    torch.cuda.synchronize()
    # the first round finds the device idle, so that it also times the host
    return [statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairs[1:]) for pairs in stamps]


def seconds_of(case: Case) -> list[float]:
    """Seconds of one run of the case and of its baseline, from graphs that take turns."""
    sides = [run for run in (case.run, case.baseline) if run is not None]
    graphs = [captured(run) for run in sides]
    taken = replay_seconds([graph for graph, _ in graphs])
    seconds = [time / repeats for time, (_, repeats) in zip(taken, graphs, strict=True)]
    for graph, _ in graphs:
        graph.reset()
    return seconds


def timings(
    op: str, bandwidth: float, measure: Callable[[Case], Sequence[float]] = seconds_of
) -> Iterator[Timing | str]:
    """Each case of an op as soon as it is timed, or in one line what went wrong with it."""
    name = op
    try:
        module = importlib.import_module(f"specdec.kernels.{op}.bench")
        for case in module.cases(torch.device("cuda")):
            name = f"{op}, {case.name}"
            try:
                yield timing(op, case, measure(case), bandwidth)
            except Exception as error:
                yield _failure(name, error)
    except Exception as error:
        yield _failure(name, error)


def _failure(name: str, error: Exception) -> str:
    return " ".join(f"{name}: {type(error).__name__}: {error}".split())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", metavar="op", help="all that have a bench by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    args = parser.parse_args(argv)
    unknown = [op for op in args.ops if op not in ops()]
    if unknown:
        print(f"no bench for {unknown[0]!r}; there are: {', '.join(ops())}", file=sys.stderr)
        return 2
    if not has_gpu("specdec.kernels.bench times ops"):
        return 1
    from specdec.kernels.bandwidth import read_bandwidth

    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read bandwidth {bandwidth / 1e9:.0f} GB/s")
    print(HEADER, flush=True)
    rows, failed = [], False
    for op in args.ops or ops():
        for row in timings(op, bandwidth):
            if isinstance(row, str):
                failed = True
                print(row, file=sys.stderr, flush=True)
            else:
                rows.append(row)
                print(line(row), flush=True)
        gc.collect()
        torch.cuda.empty_cache()  # inputs of one op are no room for the next one's
    if args.json:
        record = {
            "device": torch.cuda.get_device_name(),
            "read_bytes_per_second": bandwidth,
            "timings": [row._asdict() for row in rows],
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
