"""Products that the plans give to the kernel, against cuBLAS; and a stack of layers of an 8B model.

`tune.py` times what the plans leave to cuBLAS as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.add_norm.kernel import add_norm
from specdec.kernels.bench import Case
from specdec.kernels.few_rows import kernel
from specdec.kernels.few_rows.plan import Plan, product_plan
from specdec.kernels.gated_act.kernel import gated_act

ROWS = (1, 4, 8, 16, 32, 64)
COLD_BYTES = 200 * 2**20  # weights in turn, so that no copy is found in the 50 MB of cache
LAYERS = 4
SIZE, INNER, QKV, VOCAB, DRAFT_VOCAB = 4096, 14336, 6144, 128256, 32000
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
            run = in_turn(partial(_product, x, plan=plan), weights)
            size = weights[0].nbytes + x.nbytes + 2 * rows * num_cols
            made.append(
                Case(f"{name}, {rows} rows", run, size, in_turn(partial(F.linear, x), weights))
            )
    return made + _stacks(device)


def _stacks(device: torch.device) -> list[Case]:
    """Everything of a layer but attention, several layers in a row: what overlapping is for."""
    shapes = ((QKV, SIZE), (SIZE, SIZE), (2 * INNER, SIZE), (SIZE, INNER))
    layers = [[_weight(*shape, device) for shape in shapes] for _ in range(LAYERS)]
    norm = torch.randn(SIZE, device=device).bfloat16()
    size = sum(weight.nbytes for layer in layers for weight in layer)
    made = []
    for rows in ROWS:
        x = torch.randn(rows, SIZE, device=device).bfloat16()
        fused = partial(
            _stack, layers, norm, x, partial(_planned, rows), partial(_planned_gated, rows)
        )
        library = partial(_stack, layers, norm, x, F.linear, _library_gated)
        made.append(Case(f"{LAYERS} layers but attention, {rows} rows", fused, size, library))
    return made


def _stack(
    layers: list[list[Tensor]],
    norm: Tensor,
    hidden: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
    gated: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    residual = None
    for qkv, out, gate_up, down in layers:
        normed, residual = add_norm(hidden, residual, norm, 1e-5)
        attended = product(normed, qkv)[:, :SIZE]
        normed, residual = add_norm(product(attended, out), residual, norm, 1e-5)
        hidden = product(gated(normed, gate_up), down)
    return hidden


def _planned(rows: int, x: Tensor, weight: Tensor) -> Tensor:
    plan = product_plan(rows, *weight.shape)
    return F.linear(x, weight) if plan is None else kernel.few_rows(x, weight, None, plan)


def _planned_gated(rows: int, x: Tensor, weight: Tensor) -> Tensor:
    num_cols, width = weight.shape
    plan = product_plan(rows, num_cols // 2, width, gated=True)
    if plan is None:
        return _library_gated(x, weight)
    return kernel.few_rows_gated(x, weight, None, plan)


def _product(x: Tensor, weight: Tensor, *, plan: Plan) -> Tensor:
    return kernel.few_rows(x, weight, None, plan)


def _library_gated(x: Tensor, weight: Tensor) -> Tensor:
    return gated_act(F.linear(x, weight))


def _weight(num_cols: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(num_cols, width, device=device, dtype=torch.bfloat16) / width**0.5


def weights_in_turn(
    num_cols: int, width: int, device: torch.device, at_least: int = 1
) -> list[Tensor]:
    """Enough matrices [num_cols, width] that none stays in the cache until its next turn."""
    count = max(at_least, -(-COLD_BYTES // (2 * num_cols * width)))
    return [_weight(num_cols, width, device) for _ in range(count)]


def in_turn(fn: Callable[[Tensor], object], weights: list[Tensor]) -> Callable[[], object]:
    """`fn` of the next weight at each call."""
    turns = cycle(weights)
    return lambda: fn(next(turns))
