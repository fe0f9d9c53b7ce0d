"""Times ways to run the products of an 8B model on the GPU at hand, and names the best plans.

    python -m specdec.kernels.few_rows.tune [--quick] [--rows N] [product ...]

A line is one plan: the time of the product alone, its weights rotated past the cache, and of four
layers (all but attention) where it takes that product and the best plans so far take the others.
The products of a layer are compared in the layers, the others alone; cuBLAS is one of the choices.
Every cut of a product is tried with every feature; `--quick` tries each cut with two features, and
the rest of the features with the best cut. Last come times at other rows, and lines for `plan.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product as pairs_of
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.bench import Case, seconds_of
from specdec.kernels.few_rows import bench
from specdec.kernels.few_rows.plan import Plan

FEATURES: tuple[dict[str, Any], ...] = (
    {"overlap": False},
    {"held": 2},
    {},
    {"held": 1},
    {"held": 4},
    {"late": True},
    {"late": True, "held": 2},
    {"ahead": 2},
    {"late": True, "ahead": 4},
)
QUICK = 2  # features that every cut is tried with
FINALISTS = 4  # plans of a product that are compared again when the others have theirs
ROWS = (1, 4, 8, 16)
LAYERS = bench.LAYERS


class Product(NamedTuple):
    """One product and what to try: (cols, step, split, warps, stages) of each cut."""

    num_cols: int  # gated: of each half
    width: int
    cuts: tuple[tuple[int, int, int, int, int], ...]
    gated: bool = False


SIZE, INNER, QKV = bench.SIZE, bench.INNER, bench.QKV
# One wave of equal programs or many short ones; shared outputs or narrow programs.
PRODUCTS = {
    "o": Product(
        SIZE,
        SIZE,
        (
            (32, 128, 2, 4, 4),
            (32, 128, 2, 4, 7),
            (32, 128, 4, 4, 4),
            (16, 128, 1, 2, 8),
            (16, 256, 1, 4, 4),
        ),
    ),
    "qkv": Product(
        QKV,
        SIZE,
        (
            (32, 128, 2, 4, 4),
            (32, 128, 2, 4, 6),
            (64, 128, 4, 4, 4),
            (16, 128, 1, 2, 6),
            (16, 256, 1, 4, 4),
        ),
    ),
    "gate_up": Product(
        INNER,
        SIZE,
        (
            (56, 128, 1, 4, 3),
            (32, 64, 1, 4, 6),
            (16, 128, 1, 4, 4),
            (16, 128, 2, 4, 4),
            (32, 128, 1, 4, 4),
            (32, 128, 2, 4, 3),
            (64, 64, 1, 4, 5),
            (112, 64, 1, 8, 4),
        ),
        gated=True,
    ),
    "down": Product(
        SIZE,
        INNER,
        (
            (32, 128, 2, 4, 4),
            (32, 128, 2, 4, 6),
            (32, 128, 4, 4, 4),
            (64, 128, 4, 4, 4),
            (64, 128, 4, 8, 4),
            (128, 64, 4, 4, 5),
            (16, 256, 1, 4, 4),
        ),
    ),
    "fc": Product(
        SIZE,
        3 * SIZE,
        (
            (32, 128, 2, 4, 5),
            (32, 128, 4, 4, 4),
            (64, 128, 4, 4, 4),
            (64, 128, 4, 8, 4),
            (128, 64, 4, 4, 5),
        ),
    ),
    "draft LM head": Product(
        bench.DRAFT_VOCAB,
        SIZE,
        ((64, 128, 1, 4, 4), (32, 128, 1, 4, 4), (32, 128, 1, 4, 6), (64, 128, 2, 4, 4)),
    ),
}
LAYER = tuple(bench.LAYER)
Plans = dict[str, Plan | None]  # None is cuBLAS


class Times(NamedTuple):
    """Seconds of a product alone and of the layers with it; infinite where it did not run."""

    alone: float
    layers: float


def first_try(product: Product, *, quick: bool) -> list[Plan]:
    """The plans to begin with: each cut with the first features, or with all."""
    features = FEATURES[: QUICK if quick else len(FEATURES)]
    return [Plan(*cut)._replace(**more) for cut, more in pairs_of(product.cuts, features)]


def with_features(plan: Plan) -> list[Plan]:
    """The cut of `plan` with every feature."""
    return [Plan(*plan[:5])._replace(**more) for more in FEATURES]


def search(
    product: Product, time: Callable[[Plan | None], Times], *, quick: bool
) -> dict[Plan | None, Times]:
    """Times of all plans tried and of cuBLAS (None), the best in the layers first."""
    times: dict[Plan | None, Times] = {None: time(None)}
    times |= {plan: time(plan) for plan in first_try(product, quick=quick)}
    best = min((plan for plan in times if plan is not None), key=lambda plan: _rank(times[plan]))
    times |= {plan: time(plan) for plan in with_features(best) if plan not in times}
    return dict(sorted(times.items(), key=lambda item: _rank(item[1])))


def _rank(times: Times) -> tuple[float, float]:
    return (times.layers, times.alone)


@cache
def _weights(name: str) -> list[Tensor]:
    """Matrices of a product to take in turn; those of a layer are the layers' own."""
    num_cols, width, _, gated = PRODUCTS[name]
    shape = (num_cols * (2 if gated else 1), width)
    return bench.weights_in_turn(*shape, torch.device("cuda"), at_least=LAYERS)


@cache
def _random(num_rows: int, width: int) -> Tensor:
    return torch.randn(num_rows, width, device="cuda").bfloat16()


def _alone(name: str, plan: Plan | None, rows: int) -> float:
    product = PRODUCTS[name]
    call = partial(bench.run, _random(rows, product.width), plan=plan, gated=product.gated)
    return seconds_of(Case(name, bench.in_turn(call, _weights(name)), 0))[0]


def _layers(plans: Plans, rows: int) -> float:
    return seconds_of(Case("layers", partial(_run_layers, plans, rows), 0))[0]


def _run_layers(plans: Plans, rows: int) -> Tensor:
    """As a model runs them: a product whose reader has a plan too ends in the sum and norm."""
    layers = [[_weights(name)[layer] for name in LAYER] for layer in range(LAYERS)]
    x, norm = _random(rows, SIZE), _random(1, SIZE)[0]
    return bench.stack(layers, norm, x, [plans[name] for name in LAYER])


def _time(name: str, plans: Plans, rows: int, plan: Plan | None) -> Times:
    """Prints the line of one plan; a plan that does not fit the chip has no time."""
    try:
        alone = _alone(name, plan, rows)
        layers = _layers(plans | {name: plan}, rows) if name in LAYER else 0.0
    except Exception as error:
        print(f"{name:<14} {_shown(plan)}: {' '.join(str(error).split())[:80]}", flush=True)
        return Times(float("inf"), float("inf"))
    beside = f"   layers {layers * 1e6:8.2f}" if layers else ""
    print(f"{name:<14} {_shown(plan):<64} alone {alone * 1e6:7.2f}{beside}", flush=True)
    return Times(alone, layers)


def _shown(plan: Plan | None) -> str:
    if plan is None:
        return "cuBLAS"
    more = {k: v for k, v in plan._asdict().items() if v != Plan._field_defaults.get(k)}
    return "Plan(" + ", ".join(f"{name}={value}" for name, value in more.items()) + ")"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("products", nargs="*", help="all by default")
    parser.add_argument("--quick", action="store_true", help="about a minute for all")
    parser.add_argument("--rows", type=int, default=4, help="that plans are compared at")
    args = parser.parse_args(argv)
    names, rows = args.products or list(PRODUCTS), args.rows
    unknown = [name for name in names if name not in PRODUCTS]
    if unknown:
        print(f"no product {unknown[0]!r}; there are: {', '.join(PRODUCTS)}", file=sys.stderr)
        return 2
    plans: Plans = {name: Plan(*product.cuts[0]) for name, product in PRODUCTS.items()}
    finalists: dict[str, list[Plan | None]] = {}
    for name in names:
        times = search(PRODUCTS[name], partial(_time, name, plans, rows), quick=args.quick)
        finalists[name] = list(times)[:FINALISTS]
        plans[name] = finalists[name][0]
    print("again, beside the best of the others", flush=True)
    for name in [name for name in names if name in LAYER]:
        choices: list[Plan | None] = list(dict.fromkeys([*finalists[name], None]))
        again = {plan: _time(name, plans, rows, plan) for plan in choices}
        plans[name] = min(again, key=lambda plan: again[plan].layers)
    _report(plans, names)
    return 0


def _report(plans: Plans, names: Sequence[str]) -> None:
    library: Plans = dict.fromkeys(PRODUCTS)
    for rows in ROWS:
        both = [_layers(side, rows) * 1e6 for side in (plans, library)]
        print(f"{LAYERS} layers, {rows} rows: {both[0]:.2f} against {both[1]:.2f} of cuBLAS")
        for name in names:
            both = [_alone(name, side[name], rows) * 1e6 for side in (plans, library)]
            print(f"  {name}: {both[0]:.2f} against {both[1]:.2f}", flush=True)
    for name in names:
        num_cols, width, _, gated = PRODUCTS[name]
        table = "GATED" if gated else "PRODUCTS"
        print(f"{table}: ({num_cols}, {width}, {_shown(plans[name])}),  # {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
