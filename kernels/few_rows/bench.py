"""Products that the plans give to the kernel, against cuBLAS; and a stack of layers of an 8B model.

`tune.py` times what the plans leave to cuBLAS as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.add_norm.kernel import add_norm
from specdec.kernels.bench import Case
from specdec.kernels.few_rows import kernel
from specdec.kernels.few_rows.plan import Plan, fp8_plan, product_plan
from specdec.kernels.few_rows.reference import SCALED, Fp8Weight, Normed
from specdec.kernels.gated_act.kernel import gated_act

ROWS = (1, 4, 8, 16, 32, 64)
COLD_BYTES = 200 * 2**20  # weights in turn, so that no copy is found in the 50 MB of cache
LAYERS = 4
EPS = 1e-5
SIZE, INNER, QKV, VOCAB, DRAFT_VOCAB = 4096, 14336, 6144, 128256, 32000
# (outputs, summed dimension, gated): outputs of each half
LAYER = {
    "qkv": (QKV, SIZE, False),
    "o": (SIZE, SIZE, False),
    "gate_up": (INNER, SIZE, True),
    "down": (SIZE, INNER, False),
}
PRODUCTS = {
    "qkv": (QKV, SIZE),
    "o": (SIZE, SIZE),
    "down": (SIZE, INNER),
    "fc of three streams": (SIZE, 3 * SIZE),
    "wide qkv": (QKV, 2 * SIZE),
    "LM head": (VOCAB, SIZE),
    "router of 128 experts": (128, 2048),
    "draft LM head": (DRAFT_VOCAB, SIZE),
}


def cases(device: torch.device) -> list[Case]:
    """Products with random bf16 weights; then whole layers without attention."""
    made = []
    for name, (num_cols, width) in PRODUCTS.items():
        planned = [(rows, product_plan(rows, num_cols, width)) for rows in ROWS]
        if not any(plan for _, plan in planned):
            continue
        weights = weights_in_turn(num_cols, width, device)
        for rows, plan in planned:
            if plan is None:
                continue
            x = torch.randn(rows, width, device=device).bfloat16()
            ours = in_turn(partial(run, x, plan=plan), weights)
            size = weights[0].nbytes + x.nbytes + 2 * rows * num_cols
            made.append(
                Case(f"{name}, {rows} rows", ours, size, in_turn(partial(F.linear, x), weights))
            )
    return made + _stacks(device)


def _stacks(device: torch.device) -> list[Case]:
    """Everything of a layer but attention, several layers in a row: what overlapping is for.

    Kernels and a norm launched between them, against cuBLAS; then, where every product is planned,
    norms that are left to the products, against the same kernels with a norm between them. Then
    the first with matrices in fp8, against those in bf16.
    """
    shapes = [(num_cols * (2 if gated else 1), width) for num_cols, width, gated in LAYER.values()]
    layers = [[_weight(*shape, device) for shape in shapes] for _ in range(LAYERS)]
    norm = torch.randn(SIZE, device=device).bfloat16()
    size = sum(weight.nbytes for layer in layers for weight in layer)
    bytes_each = [[in_bytes(weight) for weight in layer] for layer in layers]
    made = []
    for rows in ROWS:
        x = torch.randn(rows, SIZE, device=device).bfloat16()
        plans = [product_plan(rows, *shape, gated=gated) for *shape, gated in LAYER.values()]
        between = partial(stack, layers, norm, x, plans, ends=False)
        library = partial(stack, layers, norm, x, [None] * len(plans))
        name = f"{LAYERS} layers but attention, {rows} rows"
        made.append(Case(name, between, size, library))
        if all(plans):
            left = partial(stack, layers, norm, x, plans)
            made.append(Case(f"{name}, norms left", left, size, between))
        plans = [fp8_plan(rows, *shape, gated=gated) for *shape, gated in LAYER.values()]
        fp8 = partial(stack, bytes_each, norm, x, plans)
        made.append(Case(f"{name}, fp8", fp8, size // 2, between))
    return made


def stack(
    layers: Sequence[Sequence[Tensor | Fp8Weight]],
    norm: Tensor,
    hidden: Tensor,
    plans: Sequence[Plan | None],
    *,
    ends: bool = True,
) -> Tensor:
    """The stream [rows, SIZE] after layers whose attention hands on the first of its input.

    Args:
        layers: the matrices of `LAYER`, of each layer.
        norm: [SIZE] the weight of every norm.
        plans: of the products of `LAYER`; None is cuBLAS.
        ends: a product ends in the sum and norm where it and the reader have plans, as in a model.
    """
    normed, residual = add_norm(hidden, None, norm, EPS)
    for weights in layers:
        qkv, out, gate_up, down = zip(weights, plans, strict=True)
        attended = run(normed, *qkv).flatten()[: hidden.numel()].view(hidden.shape)
        normed, residual = _added(attended, out, residual, norm, gate_up[1] if ends else None)
        inner = run(normed, *gate_up, gated=True)
        normed, residual = _added(inner, down, residual, norm, qkv[1] if ends else None)
    return residual


def _added(
    x: Tensor,
    product: tuple[Tensor | Fp8Weight, Plan | None],
    residual: Tensor,
    norm: Tensor,
    reader: Plan | None,
) -> tuple[Tensor | Normed, Tensor]:
    weight, plan = product
    if plan is None or reader is None:
        return add_norm(run(x, weight, plan), residual, norm, EPS)
    return kernel.few_rows_add_norm(x, weight, None, residual, norm, EPS, plan)


def run(
    x: Tensor | Normed, weight: Tensor | Fp8Weight, plan: Plan | None, *, gated: bool = False
) -> Tensor:
    """One product by its plan; None is cuBLAS."""
    if plan is not None:
        return (kernel.few_rows_gated if gated else kernel.few_rows)(x, weight, None, plan)
    assert isinstance(x, Tensor)
    if isinstance(weight, Fp8Weight):
        weight = weight.plain().to(x.dtype)
    out = F.linear(x, weight)
    return gated_act(out) if gated else out


def _weight(num_cols: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(num_cols, width, device=device, dtype=torch.bfloat16) / width**0.5


def in_bytes(weight: Tensor) -> Fp8Weight:
    """About the same matrix, its numbers in the middle of what fp8 has."""
    factor = 64 / weight.float().abs().max()
    scale = torch.rand([-(-size // SCALED) for size in weight.shape], device=weight.device) + 0.5
    return Fp8Weight((weight * factor).to(torch.float8_e4m3fn), scale / factor)


def weights_in_turn(
    num_cols: int, width: int, device: torch.device, at_least: int = 1
) -> list[Tensor]:
    """Enough matrices [num_cols, width] that none stays in the cache until its next turn."""
    count = max(at_least, -(-COLD_BYTES // (2 * num_cols * width)))
    return [_weight(num_cols, width, device) for _ in range(count)]


def in_turn(fn: Callable[[Any], object], weights: Sequence[Any]) -> Callable[[], object]:
    """`fn` of the next weight at each call."""
    turns = cycle(weights)
    return lambda: fn(next(turns))
