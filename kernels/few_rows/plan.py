"""Which products run on the kernel, and how each shape is cut: tables to adjust by measurement.

cuBLAS keeps what is not listed. Between two of the row counts listed a plan does not depend on how
many rows there are: a row's result is the same whatever stands beside it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.few_rows.reference import Fp8Weight

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
    swap_ab: bool = False  # the matrix first: `wgmma` from 64 outputs (cols) and 4 warps on


Table = tuple[tuple[float, float, Plan | None], ...]
# (most outputs, most of the summed dimension, plan or None for the library): the first that fits
ANY = float("inf")
ROUTER = Plan(cols=16, step=128, split=8, warps=2, stages=3, ahead=2)
LM_HEAD = Plan(cols=64, step=128, split=1, warps=4, stages=4, ahead=2)
SQUARE = Plan(cols=32, step=128, split=2, warps=4, stages=4, late=True)
# Programs of one `wgmma` wide, which share outputs.
SWAPPED = Plan(cols=64, step=128, split=4, warps=4, stages=3, late=True, swap_ab=True)
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
        (6144, 1024, SQUARE),
        (3584, 4096, SQUARE._replace(ahead=4)),
        (4096, 4096, SWAPPED._replace(split=2, stages=5, ahead=4)),
        (4096, 14336, SWAPPED),
        (6144, 8192, SWAPPED),
        (16384, ANY, None),
        (32768, 2048, None),
        (32768, 4096, LM_HEAD._replace(swap_ab=True)),  # of a draft's own vocabulary
        *OTHERS,
    ),
    32: (
        (512, 4096, ROUTER),
        (1024, 1280, SMALL),
        (1024, 2048, MORE._replace(split=3)),
        (2048, ANY, None),
        (3584, 4096, SQUARE._replace(overlap=False, late=False)),
        (4096, 4096, SWAPPED._replace(split=2, stages=4, overlap=False, late=False)),
        (4096, 14336, SWAPPED),
        *OTHERS,
    ),
    64: (
        (512, ANY, None),
        (1024, 1280, MORE),
        (1024, 2048, MORE._replace(split=3)),
        (2048, ANY, None),
        (4096, 4096, None),
        (3584, 14336, SWAPPED),
        (4096, 14336, SWAPPED._replace(split=2, stages=4)),
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
        (14336, 4096, GATE_UP._replace(swap_ab=True)),
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
        (14336, 4096, GATE_UP._replace(step=64, stages=4, swap_ab=True)),
        (ANY, ANY, None),
    ),
    128: ((1536, 1280, MORE), (ANY, ANY, None)),
}
FP8_EXACT = Plan(cols=32, step=32, split=4, warps=8, stages=3, late=True)  # rows in fp32
FP8_WIDE = Plan(cols=64, step=128, split=1, warps=4, stages=4, late=True)
FP8_SQUARE = Plan(cols=32, step=128, split=4, warps=4, stages=6, late=True)
# Warps side by side: none turns bytes into numbers that another one turns as well.
FP8_PAIR = Plan(cols=64, step=128, split=4, warps=2, stages=3, late=True)
FP8_PRODUCTS: dict[int, Table] = {
    16: (
        (4096, 4096, FP8_SQUARE),
        (4096, ANY, FP8_SQUARE._replace(cols=128, split=8, stages=5)),
        (8192, ANY, FP8_SQUARE._replace(cols=64)),
        (ANY, ANY, FP8_WIDE),
    ),
    32: (
        (4096, 4096, FP8_SQUARE._replace(cols=64)),
        (4096, ANY, FP8_SQUARE._replace(cols=64, stages=3)),
        (8192, ANY, FP8_PAIR),
        (ANY, ANY, FP8_PAIR._replace(split=1)),
    ),
    # bytes become bf16 in registers, and `wgmma` takes its first operand from there
    64: ((8192, ANY, SWAPPED), (ANY, ANY, FP8_WIDE._replace(stages=3))),
}
FP8_ROWS = max(FP8_PRODUCTS)  # most of a product with a matrix in fp8
FP8_GATED: dict[int, Table] = {
    16: ((ANY, ANY, FP8_WIDE),),
    32: ((ANY, ANY, Plan(cols=32, step=128, split=1, warps=2, stages=3, late=True, swap_ab=True)),),
    64: ((ANY, ANY, FP8_WIDE._replace(stages=3)),),
}


def product_plan(num_rows: int, num_cols: int, width: int, *, gated: bool = False) -> Plan | None:
    """The plan for [num_rows, width] @ [num_cols, width].T; None leaves it to the library.

    Args:
        num_cols: outputs; gated, of each half.
    """
    if num_cols < MIN_COLS or width < MIN_WIDTH or width % 64:
        return None
    plan = _first(GATED if gated else PRODUCTS, num_rows, num_cols, width)
    return plan if plan is None or width % 128 == 0 else plan._replace(step=64)


def fp8_plan(
    num_rows: int, num_cols: int, width: int, *, gated: bool = False, exact: bool = False
) -> Plan | None:
    """`product_plan` of a matrix in fp8, which no library takes: None for no rows or too many.

    Args:
        exact: rows are in fp32.
    """
    plan = _first(FP8_GATED if gated else FP8_PRODUCTS, num_rows, num_cols, width)
    if plan is None:
        return None
    if exact:
        return FP8_EXACT
    if gated and num_rows > 32 and num_cols % plan.cols:
        return plan._replace(warps=8)  # scales that differ within a tile take registers
    return plan


def _first(tables: dict[int, Table], num_rows: int, num_cols: int, width: int) -> Plan | None:
    """The plan of the first entry that fits, in the table of the fewest rows that do."""
    most_rows = min((most for most in tables if most >= num_rows), default=0)
    if not 0 < num_rows <= most_rows:
        return None
    return next(plan for cols, k, plan in tables[most_rows] if num_cols <= cols and width <= k)


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
