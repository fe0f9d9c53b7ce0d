"""Which products run on the kernel, and how each shape is cut: tables to adjust by measurement.

cuBLAS keeps what is not listed. Between two of the row counts listed a plan does not depend on how
many rows there are: a row's result is the same whatever stands beside it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.few_rows.reference import SCALED, Fp8Weight

MIN_COLS, MIN_WIDTH = 64, 512  # of the matrix, below which there is nothing to stream


class Plan(NamedTuple):
    """How one product is cut."""

    cols: int  # outputs of a program (gated: of each half); other than 2^n leaves lanes idle
    step: int  # of the summed dimension, in one iteration
    split: int  # programs that share an output
    warps: int
    stages: int
    overlap: bool = True  # starts while the kernel before runs out
    late: bool = False  # lets the next kernel start after its own weights, not at once
    ahead: int = 0  # iterations (2^n) whose weights are asked into the cache before that one ends
    held: int = 0  # iterations (2^n) whose weights come into registers meanwhile


Table = tuple[tuple[float, float, Plan | None], ...]
# (most outputs, most of the summed dimension, plan or None for the library): the first that fits
ANY = float("inf")
ROUTER = Plan(cols=16, step=128, split=8, warps=2, stages=3, ahead=2)
LM_HEAD = Plan(cols=64, step=128, split=1, warps=4, stages=4, ahead=2)
SQUARE = Plan(cols=32, step=128, split=2, warps=4, stages=4, late=True)
DOWN = Plan(cols=64, step=128, split=4, warps=4, stages=4, late=True)
# 14336 outputs in 256 programs, all at once
GATE_UP = Plan(cols=56, step=128, split=1, warps=4, stages=3, late=True)
# Small products take less time than launches do: most of the weights are held when the rows come.
SMALL = Plan(cols=16, step=64, split=1, warps=4, stages=4, late=True, held=8)
# With more rows there is no room for that: weights come on their way instead.
MORE = SMALL._replace(stages=6, held=0)
OTHERS: Table = ((65536, ANY, None), (ANY, ANY, LM_HEAD))
# most rows -> table; more rows than any entry has go to the library. `tune.py` searches plans.
PRODUCTS: dict[int, Table] = {
    16: (
        (512, 4096, ROUTER),
        (1024, 1280, SMALL),
        (1024, 2048, SMALL._replace(split=3)),
        (2048, ANY, None),
        (4096, 4096, SQUARE._replace(ahead=4)),
        (4096, 14336, DOWN),
        (6144, 8192, SQUARE),
        *OTHERS,
    ),
    32: (
        (512, 4096, ROUTER),
        (1024, 1280, SMALL),
        (1024, 2048, MORE._replace(split=3)),
        (2048, ANY, None),
        (4096, 4096, SQUARE._replace(overlap=False, late=False)),
        (4096, 14336, DOWN._replace(warps=8)),
        *OTHERS,
    ),
    64: (
        (512, ANY, None),
        (1024, 1280, MORE),
        (1024, 2048, MORE._replace(split=3)),
        (2048, ANY, None),
        (4096, 4096, None),
        (4096, 14336, DOWN._replace(warps=8, stages=3)),
        (ANY, ANY, None),
    ),
    128: (
        (512, ANY, None),
        (1024, 1280, MORE),
        (1024, 2048, MORE._replace(split=3)),
        (ANY, ANY, None),
    ),
}
GATED: dict[int, Table] = {
    16: (
        (1536, 1280, SMALL._replace(held=4)),
        (2048, ANY, None),
        (14336, 4096, GATE_UP),
        (ANY, ANY, None),
    ),
    32: (
        (1536, 1280, MORE),
        (2048, ANY, None),
        (14336, 4096, GATE_UP),
        (ANY, ANY, None),
    ),
    64: (
        (1536, 1280, MORE),
        (2048, ANY, None),
        (14336, 4096, GATE_UP._replace(cols=112, step=64, warps=8, stages=4)),
        (ANY, ANY, None),
    ),
    128: ((1536, 1280, MORE), (ANY, ANY, None)),
}
FP8_ROWS = 64  # most of a product with a matrix in fp8
FP8_WIDE = Plan(cols=64, step=128, split=1, warps=4, stages=4, late=True)
FP8_EXACT = Plan(cols=32, step=32, split=4, warps=8, stages=3, late=True)
FP8_SQUARE = Plan(cols=32, step=128, split=4, warps=4, stages=6, late=True)


def product_plan(num_rows: int, num_cols: int, width: int, *, gated: bool = False) -> Plan | None:
    """The plan for [num_rows, width] @ [num_cols, width].T; None leaves it to the library.

    Args:
        num_cols: outputs; gated, of each half.
    """
    tables = GATED if gated else PRODUCTS
    most_rows = min((most for most in tables if most >= num_rows), default=0)
    if not 0 < num_rows <= most_rows:
        return None
    if num_cols < MIN_COLS or width < MIN_WIDTH or width % 64:
        return None
    plan = next(plan for cols, k, plan in tables[most_rows] if num_cols <= cols and width <= k)
    return plan if plan is None or width % 128 == 0 else plan._replace(step=64)


def fp8_plan(
    num_rows: int, num_cols: int, width: int, *, gated: bool = False, exact: bool = False
) -> Plan | None:
    """`product_plan` of a matrix in fp8, which no library takes: None for no rows or too many.

    Args:
        exact: rows are in fp32.
    """
    if not 0 < num_rows <= FP8_ROWS:
        return None
    if exact:
        return FP8_EXACT
    plan = FP8_SQUARE
    if gated or num_cols > 8192:
        plan = FP8_WIDE
    elif num_cols > 4096 or num_rows > 16:
        plan = FP8_SQUARE._replace(cols=64)
    elif width > 4096:
        plan = FP8_SQUARE._replace(cols=128, split=8, stages=5)
    if num_rows <= 32:
        return plan
    # scales that differ within a tile take registers
    return plan._replace(stages=3, warps=8 if gated and num_cols % SCALED else plan.warps)


def plan_for(x: Tensor, weight: Tensor | Fp8Weight, *, gated: bool = False) -> Plan | None:
    """`product_plan` or `fp8_plan` of two tensors, where the kernel takes their types."""
    if isinstance(weight, Fp8Weight):
        plan, matrix = partial(fp8_plan, exact=x.dtype == torch.float32), weight.data
    elif weight.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype:
        plan, matrix = product_plan, weight
    else:
        return None
    if matrix.dim() != 2 or not matrix.is_contiguous():
        return None
    num_cols, width = matrix.shape
    return plan(x.numel() // width, num_cols // 2 if gated else num_cols, width, gated=gated)
