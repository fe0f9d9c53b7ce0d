"""Times ways to run the products of an 8B model on the GPU at hand, and names the best plans.

    python -m specdec.kernels.few_rows.tune [--quick] [--rows N] [product ...]

A line is one plan: the time of the product alone, its weights rotated past the cache, and of four
layers (all but attention) where it takes that product and the best plans so far take the others.
The products of a layer are compared in the layers, the others alone; cuBLAS is one of the choices,
with a matrix in fp8 unpacked first.
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

from specdec.kernels.bench import Case, has_gpu, seconds_of
from specdec.kernels.few_rows import bench
from specdec.kernels.few_rows.plan import Plan
from specdec.kernels.few_rows.reference import Fp8Weight

FEATURES: tuple[dict[str, Any], ...] = (
    {"late": True},
    {"late": True, "swap_ab": True},
    {"overlap": False},
    {"overlap": False, "swap_ab": True},
    {"held": 2},
    {},
    {"held": 1},
    {"held": 4},
    {"late": True, "held": 2},
    {"ahead": 2},
    {"late": True, "ahead": 4},
    {"ahead": 2, "swap_ab": True},
    {"late": True, "ahead": 4, "swap_ab": True},
)
# bytes are not held
FP8_FEATURES: tuple[dict[str, Any], ...] = ({"late": True}, {"late": True, "swap_ab": True}, {})
QUICK = 2  # features that every cut is tried with
FINALISTS = 4  # plans of a product that are compared again when the others have theirs
ROWS = (1, 4, 8, 16)
MAX_ROWS = 128
LAYERS = bench.LAYERS


class Product(NamedTuple):
    """One product and what to try: (cols, step, split, warps, stages) of each cut."""

    num_cols: int  # gated: of each half
    width: int
    cuts: tuple[tuple[int, int, int, int, int], ...]
    gated: bool = False
    fp8: bool = False


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
            (64, 128, 2, 4, 5),
            (64, 128, 2, 4, 4),
            (64, 128, 4, 4, 3),
        ),
    ),
    "qkv": Product(
        QKV,
        SIZE,
        (
            (32, 128, 2, 4, 4),
            (32, 128, 2, 4, 6),
            (64, 128, 4, 4, 4),
            (64, 128, 4, 4, 3),
            (64, 128, 2, 4, 4),
        ),
    ),
    "gate_up": Product(
        INNER,
        SIZE,
        (
            (56, 128, 1, 4, 3),
            (56, 64, 1, 4, 4),
            (32, 64, 1, 4, 6),
            (16, 128, 1, 4, 4),
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
            (32, 128, 4, 4, 4),
            (64, 128, 2, 4, 4),
            (64, 128, 4, 4, 4),
            (64, 128, 4, 4, 3),
            (64, 128, 4, 8, 4),
            (64, 128, 4, 8, 3),
        ),
    ),
    "fc": Product(
        SIZE,
        3 * SIZE,
        (
            (32, 128, 2, 4, 5),
            (32, 128, 4, 4, 4),
            (64, 128, 2, 4, 4),
            (64, 128, 4, 4, 4),
            (64, 128, 4, 4, 3),
            (64, 128, 4, 8, 4),
            (64, 128, 4, 8, 3),
        ),
    ),
    "draft LM head": Product(
        bench.DRAFT_VOCAB,
        SIZE,
        ((64, 128, 1, 4, 4), (32, 128, 1, 4, 4), (32, 128, 1, 4, 6), (64, 128, 2, 4, 4)),
    ),
}
FP8_CUTS = {
    "o": ((32, 128, 4, 4, 6), (64, 128, 4, 4, 6), (64, 128, 4, 4, 3), (64, 128, 8, 2, 4)),
    "qkv": ((64, 128, 4, 4, 6), (32, 128, 2, 4, 6), (64, 128, 4, 2, 3), (64, 128, 4, 4, 3)),
    "gate_up": ((64, 128, 1, 4, 4), (64, 128, 1, 4, 3), (32, 128, 1, 2, 3), (32, 128, 1, 2, 4)),
    "down": ((128, 128, 8, 4, 5), (64, 128, 4, 4, 6), (64, 128, 8, 2, 3), (64, 128, 4, 4, 3)),
}
PRODUCTS |= {
    f"fp8 {name}": PRODUCTS[name]._replace(cuts=cuts, fp8=True) for name, cuts in FP8_CUTS.items()
}
Plans = dict[str, Plan | None]  # None is cuBLAS


class Times(NamedTuple):
    """Seconds of a product alone and of the layers with it; infinite where it did not run."""

    alone: float
    layers: float


def first_try(product: Product, *, quick: bool) -> list[Plan]:
    """The plans to begin with: each cut with the first features, or with all."""
    features = _features(product)[: QUICK if quick else None]
    return [Plan(*cut)._replace(**more) for cut, more in pairs_of(product.cuts, features)]


def with_features(product: Product, plan: Plan) -> list[Plan]:
    """The cut of `plan` with every feature."""
    return [Plan(*plan[:5])._replace(**more) for more in _features(product)]


def _features(product: Product) -> tuple[dict[str, Any], ...]:
    return FP8_FEATURES if product.fp8 else FEATURES


def search(
    product: Product, time: Callable[[Plan | None], Times], *, quick: bool
) -> dict[Plan | None, Times]:
    """Times of all plans tried and of cuBLAS (None), the best in the layers first."""
    times: dict[Plan | None, Times] = {None: time(None)}
    times |= {plan: time(plan) for plan in first_try(product, quick=quick)}
    best = min((plan for plan in times if plan is not None), key=lambda plan: _rank(times[plan]))
    times |= {plan: time(plan) for plan in with_features(product, best) if plan not in times}
    return dict(sorted(times.items(), key=lambda item: _rank(item[1])))


def _rank(times: Times) -> tuple[float, float]:
    return (times.layers, times.alone)


def layer_of(name: str) -> tuple[str, ...]:
    """The products of the layer that this one is part of; none where it is part of none."""
    kind = "fp8 " if PRODUCTS[name].fp8 else ""
    names = tuple(kind + part for part in bench.LAYER)
    return names if name in names else ()


@cache
def _weights(name: str) -> Sequence[Tensor | Fp8Weight]:
    """Matrices of a product to take in turn; those of a layer are the layers' own."""
    product = PRODUCTS[name]
    shape = (product.num_cols * (2 if product.gated else 1), product.width)
    weights = bench.weights_in_turn(*shape, torch.device("cuda"), at_least=LAYERS)
    return [bench.in_bytes(weight) for weight in weights] if product.fp8 else weights


@cache
def _random(num_rows: int, width: int) -> Tensor:
    return torch.randn(num_rows, width, device="cuda").bfloat16()


def _alone(name: str, plan: Plan | None, rows: int) -> float:
    product = PRODUCTS[name]
    call = partial(bench.run, _random(rows, product.width), plan=plan, gated=product.gated)
    return seconds_of(Case(name, bench.in_turn(call, _weights(name)), 0))[0]


def _layers(names: tuple[str, ...], plans: Plans, rows: int) -> float:
    return seconds_of(Case("layers", partial(_run_layers, names, plans, rows), 0))[0]


def _run_layers(names: tuple[str, ...], plans: Plans, rows: int) -> Tensor:
    """As a model runs them: a product whose reader has a plan too ends in the sum and norm."""
    layers = [[_weights(name)[layer] for name in names] for layer in range(LAYERS)]
    x, norm = _random(rows, SIZE), _random(1, SIZE)[0]
    return bench.stack(layers, norm, x, [plans[name] for name in names])


def _time(name: str, plans: Plans, rows: int, plan: Plan | None) -> Times:
    """Prints the line of one plan; a plan that does not fit the chip has no time."""
    try:
        alone = _alone(name, plan, rows)
        layers = _layers(names, plans | {name: plan}, rows) if (names := layer_of(name)) else 0.0
    except Exception as error:
        print(f"{name:<14} {_shown(plan)}: {' '.join(str(error).split())[:80]}", flush=True)
        return Times(float("inf"), float("inf"))
    beside = f"   layers {layers * 1e6:8.2f}" if layers else ""
    print(f"{name:<14} {_shown(plan):<88} alone {alone * 1e6:7.2f}{beside}", flush=True)
    return Times(alone, layers)


def _shown(plan: Plan | None) -> str:
    if plan is None:
        return "cuBLAS"
    more = {k: v for k, v in plan._asdict().items() if v != Plan._field_defaults.get(k)}
    return "Plan(" + ", ".join(f"{name}={value}" for name, value in more.items()) + ")"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("products", nargs="*", help="all by default")
    parser.add_argument("--quick", action="store_true", help="a few minutes for all")
    parser.add_argument("--rows", type=int, default=4, help="that plans are compared at")
    args = parser.parse_args(argv)
    names, rows = args.products or list(PRODUCTS), args.rows
    unknown = [name for name in names if name not in PRODUCTS]
    if unknown:
        print(f"no product {unknown[0]!r}; there are: {', '.join(PRODUCTS)}", file=sys.stderr)
        return 2
    if not 0 < rows <= MAX_ROWS:
        print(f"--rows {rows} is not between 1 and {MAX_ROWS}", file=sys.stderr)
        return 2
    if not has_gpu("specdec.kernels.few_rows.tune times products"):
        return 1
    plans: Plans = {name: Plan(*product.cuts[0]) for name, product in PRODUCTS.items()}
    finalists: dict[str, list[Plan | None]] = {}
    for name in names:
        times = search(PRODUCTS[name], partial(_time, name, plans, rows), quick=args.quick)
        finalists[name] = list(times)[:FINALISTS]
        plans[name] = finalists[name][0]
    print("again, beside the best of the others", flush=True)
    for name in filter(layer_of, names):
        choices: list[Plan | None] = list(dict.fromkeys([*finalists[name], None]))
        again = {plan: _time(name, plans, rows, plan) for plan in choices}
        plans[name] = min(again, key=lambda plan: again[plan].layers)
    _report(plans, names, sorted({*ROWS, rows}))
    return 0


def _report(plans: Plans, names: Sequence[str], rows_of_each: Sequence[int]) -> None:
    library: Plans = dict.fromkeys(PRODUCTS)
    for rows in rows_of_each:
        for layer in dict.fromkeys(filter(None, map(layer_of, names))):
            both = [_layers(layer, side, rows) * 1e6 for side in (plans, library)]
            kind = "fp8 layers" if PRODUCTS[layer[0]].fp8 else "layers"
            print(f"{LAYERS} {kind}, {rows} rows: {both[0]:.2f} against {both[1]:.2f} of cuBLAS")
        for name in names:
            both = [_alone(name, side[name], rows) * 1e6 for side in (plans, library)]
            print(f"  {name}: {both[0]:.2f} against {both[1]:.2f}", flush=True)
    for name in names:
        product = PRODUCTS[name]
        table = ("FP8_" if product.fp8 else "") + ("GATED" if product.gated else "PRODUCTS")
        shape = f"{product.num_cols}, {product.width}"
        print(f"{table}: ({shape}, {_shown(plans[name])}),  # {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
