"""Building blocks of every family: pure functions of tensors, and trees of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.add_norm import reference as norms
from specdec.kernels.cache_write import reference as cache_write
from specdec.kernels.few_rows.plan import Plan, plan_for
from specdec.kernels.few_rows.reference import Fp8Weight, Normed, rows_in
from specdec.kernels.gated_act.reference import gated_act
from specdec.kernels.rotary.reference import rotary_tables
from specdec.kernels.runtime import uses_triton
from specdec.models.quantize import is_quantised, is_torchao, quantised, quantised_linear

PACKED_MIN_ROWS = 4  # packed products of 1 to 3 rows are no faster than of 4
WIDE = (torch.bfloat16, torch.float32)  # types whose range a stream times a norm's weight stays in


class Rotary(NamedTuple):
    """Rotation of each row; shared by all heads and layers of a pass."""

    cos: Tensor  # [..., 1, D]
    sin: Tensor  # [..., 1, D], negated in the first half


class Product(NamedTuple):
    """A product that its reader makes, and may end in what comes next: x @ weight.T + bias."""

    x: Tensor | Normed  # [..., in]
    weight: Tensor | Fp8Weight  # [out, in]
    bias: Tensor | None
    plan: Plan


def linear(x: Tensor | Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [..., in] times [out, in] (plain or from `pack`) gives [..., out]."""
    if (plan := _few_rows_plan(x, weight)) is not None:
        from specdec.kernels.few_rows.kernel import few_rows

        return few_rows(x, weight, bias, plan)
    if isinstance(x, Normed):
        x = (x.rows * x.scale()).to(x.rows.dtype)
    if isinstance(weight, Fp8Weight):
        return quantised_linear(x, weight, bias)
    if weight.is_mkldnn:
        rows = x.shape[0]
        if x.dim() == 2 and rows < PACKED_MIN_ROWS:
            x = F.pad(x, (0, 0, 0, PACKED_MIN_ROWS - rows))
            return _packed_linear(x, weight, bias)[:rows]
        return _packed_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def product(x: Tensor | Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor | Product:
    """`linear`, left to its reader (`add_rms_norm`, `made`) where the few-row kernel takes it.

    Its bytes are read when the reader runs, so that nothing may change x or weight before.
    """
    plan = _few_rows_plan(x, weight)
    if plan is not None and rows_in(x).dtype in WIDE:
        return Product(x, weight, bias, plan)
    return linear(x, weight, bias)


def made(x: Tensor | Product) -> Tensor:
    """The result [..., out] of a product; a tensor is one already."""
    if isinstance(x, Tensor):
        return x
    from specdec.kernels.few_rows.kernel import few_rows

    return few_rows(*x)


def pack(weight: Tensor) -> Tensor:
    """The weight in the CPU library's blocked layout; unchanged elsewhere or where unsupported.

    Without it every product reorders the weight: measured 1.5 to 2.5 times slower for few rows. A
    packed weight serves `linear` only and has no gradient. While a target is loaded with quantised
    weights, this is where they become so.
    """
    weight = quantised(weight)
    if is_quantised(weight):
        return weight
    if weight.is_mkldnn or weight.device.type != "cpu" or not _can_pack(weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def unpack(weight: Tensor) -> Tensor:
    """The plain weight behind a packed one; a plain one unchanged."""
    return weight.to_dense() if weight.is_mkldnn else weight


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in fp32, returned in x's dtype.

    With `zero_centred` the factor is 1 + weight.
    """
    if uses_triton():
        from specdec.kernels.add_norm import kernel

        return kernel.rms_norm(x, weight, eps, zero_centred)
    return norms.rms_norm(x, weight, eps, zero_centred)


def add_rms_norm(
    hidden: Tensor | Product,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centred: bool = False,
    reader: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor | Normed, Tensor]:
    """What a sub-block reads, and the residual stream [..., H] that it adds to.

    Args:
        hidden: the output of the sub-block before.
        residual: the stream before that; None at its start, where `hidden` is the stream.
        weight: of the norm, see `rms_norm`; None takes the stream as it is.
        reader: the matrix of the only product that reads the norm; None: something else reads it.
        gated: whether that product is a `gated_part`.

    Returns:
        (normed, summed) with summed = hidden + residual. `normed` is a `Normed` where the few-row
        kernel takes both `hidden` and its reader, unless the norm is zero-centred; else a tensor.
    """
    if (
        isinstance(hidden, Product)
        and residual is not None
        and residual.is_contiguous()
        and weight is not None
        and not zero_centred
        and reader is not None
        and _few_rows_plan(residual, reader, gated=gated) is not None
    ):
        from specdec.kernels.few_rows.kernel import few_rows_add_norm

        x, matrix, bias, plan = hidden
        return few_rows_add_norm(x, matrix, bias, residual, weight, eps, plan)
    hidden = made(hidden)
    if weight is None:
        summed = hidden if residual is None else hidden + residual
        return summed, summed
    if uses_triton():
        from specdec.kernels.add_norm import kernel

        return kernel.add_norm(hidden, residual, weight, eps, zero_centred)
    return norms.add_norm(hidden, residual, weight, eps, zero_centred)


def norm_pair(
    first: Tensor,
    second: Tensor,
    first_weight: Tensor,
    second_weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
) -> Tensor:
    """Norms of two streams [..., H] side by side: [..., 2 H]."""
    run = norms.norm_pair
    if uses_triton():
        from specdec.kernels.add_norm.kernel import norm_pair as run
    return run(first, second, first_weight, second_weight, eps, zero_centred)


def rotary(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Rotary:
    """Rotation for `positions` [...], computed in fp32 for these rows only.

    There is no table of a fixed length, so no position is out of range.
    """
    tables = rotary_tables
    if uses_triton():
        from specdec.kernels.rotary.kernel import rotary_tables as tables
    return Rotary(*tables(inv_freq, positions, dtype, scale))


def rotate(x: Tensor, rotation: Rotary) -> Tensor:
    """Rotates heads [..., heads, D]; dimension i pairs with i + D / 2."""
    return cache_write.rotate(x, rotation.cos, rotation.sin)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 * I] = [gate | up]."""
    if uses_triton():
        from specdec.kernels.gated_act import kernel

        return kernel.gated_act(gate_up)
    return gated_act(gate_up)


def gated_part(hidden: Tensor | Normed, gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """`swiglu` of a product: [..., H] times [2 I, H] gives [..., I]."""
    if (plan := _few_rows_plan(hidden, gate_up, gated=True)) is not None:
        from specdec.kernels.few_rows.kernel import few_rows_gated

        return few_rows_gated(hidden, gate_up, bias, plan)
    return swiglu(linear(hidden, gate_up, bias))


def map_tree(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`fn` on every tensor of nested tuples and NamedTuples; anything else is kept."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, tuple):
        items = [map_tree(fn, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def tree_leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree in field order."""
    leaves: list[Tensor] = []
    map_tree(lambda tensor: leaves.append(tensor) or tensor, tree)
    return leaves


def _few_rows_plan(x: Tensor | Normed, weight: Any, *, gated: bool = False) -> Plan | None:
    """How the few-row kernel takes this product; None where it is not for it."""
    if not uses_triton() or is_torchao(weight):
        return None
    if isinstance(weight, Tensor) and weight.is_mkldnn:
        return None
    return plan_for(rows_in(x), weight, gated=gated)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    ):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
