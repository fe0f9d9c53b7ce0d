"""Which products run on the kernel, and how each shape is cut: tables to adjust by measurement.

cuBLAS keeps what is not listed. A plan does not depend on how many rows there are, up to the most
it takes: a row's result is the same whatever stands beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_ROWS = 16  # of a plain product
MAX_ROWS_GATED = 16  # of a product with its activation
MIN_SIZE = 512  # rows and columns of the matrix, below which there is nothing to stream


class Plan(NamedTuple):
    """How one product is cut."""

    cols: int  # outputs of a program (gated: of each half)
    step: int  # of the summed dimension, in one iteration
    split: int  # programs that share an output
    warps: int
    stages: int
    ahead: int  # iterations whose weights are asked for before the kernel before has ended


# (most outputs, most of the summed dimension) -> plan, the first that fits
PRODUCTS: tuple[tuple[float, float, Plan], ...] = (
    (8192, 6144, Plan(cols=32, step=128, split=2, warps=4, stages=4, ahead=4)),
    (8192, float("inf"), Plan(cols=32, step=128, split=4, warps=4, stages=4, ahead=4)),
    (65536, float("inf"), Plan(cols=32, step=128, split=1, warps=4, stages=4, ahead=4)),
    (float("inf"), float("inf"), Plan(cols=64, step=128, split=1, warps=4, stages=4, ahead=2)),
)
GATED: tuple[tuple[float, float, Plan], ...] = (
    (8192, float("inf"), Plan(cols=16, step=128, split=1, warps=2, stages=4, ahead=4)),
    (float("inf"), float("inf"), Plan(cols=32, step=128, split=1, warps=4, stages=3, ahead=4)),
)


def product_plan(num_rows: int, num_cols: int, width: int, *, gated: bool = False) -> Plan | None:
    """The plan for [num_rows, width] @ [num_cols, width].T; None leaves it to the library.

    Args:
        num_cols: outputs; gated, of each half.
    """
    if not 0 < num_rows <= (MAX_ROWS_GATED if gated else MAX_ROWS):
        return None
    if num_cols < MIN_SIZE or width < MIN_SIZE or width % 64:
        return None
    table = GATED if gated else PRODUCTS
    plan = next(plan for cols, k, plan in table if num_cols <= cols and width <= k)
    return plan if width % 128 == 0 else plan._replace(step=64)


def plan_for(x: Tensor, weight: Tensor, *, gated: bool = False) -> Plan | None:
    """`product_plan` of two tensors, where the kernel takes their types."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype:
        return None
    if weight.dim() != 2 or not weight.is_contiguous():
        return None
    num_cols, width = weight.shape
    return product_plan(
        x.numel() // width, num_cols // 2 if gated else num_cols, width, gated=gated
    )
