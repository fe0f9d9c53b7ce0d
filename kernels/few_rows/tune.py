"""Searches plans for the products of an 8B model on the GPU at hand.

    python -m specdec.kernels.few_rows.tune [--rows N] [product ...]

Each figure of a plan is varied in turn from the plan in use, and the best value kept. Prints every
time, then a line for the table in `plan.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.bench import Case, seconds_of
from specdec.kernels.few_rows import bench, kernel
from specdec.kernels.few_rows.plan import Plan, product_plan

GATED = "gate_up"
STEPS = (64, 128, 256)
STAGES = (2, 3, 4, 5, 6)
AHEAD = (0, 2, 4, 8, 16)
SHAPES = bench.PRODUCTS | {GATED: (bench.INNER, bench.SIZE)}


def variations(plan: Plan, gated: bool) -> Iterator[Callable[[Plan], list[Plan]]]:
    """What to vary in turn: functions of the best plan so far."""
    splits = (1,) if gated else (1, 2, 4)
    cuts = [(cols, split, max(2, min(4, cols // 8))) for cols in (16, 32, 64) for split in splits]
    cuts.append((32, plan.split, 2))
    yield lambda best: [best._replace(cols=c, split=s, warps=w) for c, s, w in cuts]
    yield lambda best: [best._replace(step=value) for value in STEPS]
    yield lambda best: [best._replace(stages=value) for value in STAGES]
    yield lambda best: [best._replace(ahead=value) for value in AHEAD]


def search(plan: Plan, time: Callable[[Plan], float], gated: bool) -> tuple[Plan, float]:
    """The best plan found and its time; `time` raises where a plan does not fit the chip."""
    times = {plan: time(plan)}
    for vary in variations(plan, gated):
        for candidate in vary(min(times, key=times.__getitem__)):
            if candidate not in times:
                try:
                    times[candidate] = time(candidate)
                except Exception as error:
                    times[candidate] = float("inf")
                    print(f"  {candidate}: {' '.join(str(error).split())[:100]}")
    best = min(times, key=times.__getitem__)
    return best, times[best]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("products", nargs="*", help="all by default")
    parser.add_argument("--rows", type=int, default=4, help="that plans are compared at")
    args = parser.parse_args(argv)
    names, most_rows = args.products or list(SHAPES), args.rows
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        print(f"no product {unknown[0]!r}; there are: {', '.join(SHAPES)}", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    for name in names:
        num_cols, width = SHAPES[name]
        gated = name == GATED
        run = kernel.few_rows_gated if gated else kernel.few_rows
        weights = bench.weights_in_turn(num_cols * (2 if gated else 1), width, device)

        def time(
            plan: Plan, rows: int = most_rows, run=run, weights: list[Tensor] = weights
        ) -> float:
            x = torch.randn(rows, weights[0].shape[1], device=device).bfloat16()
            call = bench.in_turn(partial(_run, run, x, plan), weights)
            seconds = seconds_of(Case("", call, 0))[0]
            print(f"  {plan} {rows} rows: {seconds * 1e6:.2f} µs", flush=True)
            return seconds

        print(f"{name} {num_cols} x {width}", flush=True)
        start = product_plan(most_rows, num_cols, width, gated=gated) or kernel.FALLBACK
        plan, _ = search(start, time, gated)
        rates = {
            rows: weights[0].nbytes / time(plan, rows) / 1e12 for rows in sorted({1, 16, most_rows})
        }
        shown = ", ".join(f"{rate:.2f} TB/s at {rows}" for rows, rate in rates.items())
        print(f"{name}: ({num_cols}, {width}, {plan}),  # {shown}", flush=True)
    return 0


def _run(run: Callable[..., Tensor], x: Tensor, plan: Plan, weight: Tensor) -> Tensor:
    return run(x, weight, None, plan)


if __name__ == "__main__":
    sys.exit(main())
