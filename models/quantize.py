"""Quantised weights: what a target's matrices are kept in, and products with them.

`fp8` keeps e4m3 values with one fp32 scale for each block of 128 x 128 (arXiv 2412.19437, section
3.3.2): those of a checkpoint that has them, bit for bit, and else the weights rounded so. `int8`
and `int4` are torchao's weight-only forms. Only matrices that a block multiplies by `layers.linear`
are quantised; embeddings, the lm_head, norms, routers and experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.kernels.few_rows.plan import FP8_ROWS
from specdec.kernels.few_rows.reference import SCALED, Fp8Weight, few_rows

KINDS = ("none", "fp8", "int8", "int4")
LARGEST = 448.0  # of e4m3
GROUP = 128  # int4 weights that share a scale


class Loading(NamedTuple):
    """What happens to a target's matrices as they are read."""

    kind: str
    linear: dict[int, Fp8Weight]  # the fp8 weights that a block's `pack` has seen, by id


_loading: ContextVar[Loading | None] = ContextVar("quantising", default=None)


@contextmanager
def quantising(kind: str) -> Iterator[None]:
    """Matrices that `layers.pack` sees inside are quantised.

    Raises:
        CheckpointError: an unknown kind, or torchao is not installed.
    """
    if kind not in KINDS:
        raise CheckpointError(f"quantize={kind!r} is not one of {', '.join(KINDS)}")
    if kind in ("int8", "int4"):
        _torchao(kind)
    token = _loading.set(None if kind == "none" else Loading(kind, {}))
    try:
        yield
    finally:
        _loading.reset(token)


def keeps_fp8() -> bool:
    """Whether fp8 tensors of a checkpoint are to be read as they are."""
    loading = _loading.get()
    return loading is not None and loading.kind == "fp8"


def quantised(weight: Any) -> Any:
    """The weight in the form that is being loaded; as it is outside `quantising`."""
    loading = _loading.get()
    if loading is None or (isinstance(weight, Tensor) and weight.dim() != 2):
        return weight
    if loading.kind == "fp8":
        weight = weight if isinstance(weight, Fp8Weight) else to_fp8(weight)
        if ((weight.data.view(torch.uint8) & 0x7F) == 0x7F).any():
            shape = " x ".join(map(str, weight.shape))
            raise CheckpointError(
                f"quantize=fp8: a matrix of {shape} has weights that are NaN; repair the checkpoint"
            )
        loading.linear[id(weight)] = weight
        return weight
    return weight if type(weight) is not Tensor else to_int(weight, loading.kind)


def is_quantised(weight: Any) -> bool:
    return isinstance(weight, Fp8Weight) or is_torchao(weight)


def is_torchao(weight: Any) -> bool:
    return type(weight).__module__.startswith("torchao")


def settled(tree: Any, dtype: torch.dtype) -> Any:
    """A layer whose fp8 tensors are plain again where something else than `linear` reads them."""
    loading = _loading.get()
    if loading is None:
        return tree
    if isinstance(tree, Fp8Weight):
        return tree if id(tree) in loading.linear else tree.plain().to(dtype)
    if isinstance(tree, tuple):
        items = [settled(item, dtype) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def to_fp8(weight: Tensor) -> Fp8Weight:
    """A matrix [O, I] with each block's largest magnitude at the largest fp8 value."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % SCALED, 0, -rows % SCALED))
    blocks = padded.unflatten(1, (-1, SCALED)).unflatten(0, (-1, SCALED))  # [bo, 128, bi, 128]
    scale = blocks.abs().amax(dim=(1, 3)) / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    data = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return Fp8Weight(data.to(torch.float8_e4m3fn).contiguous(), scale)


def stack_fp8(parts: list[Fp8Weight]) -> Fp8Weight | None:
    """Matrices under each other; None where one does not end at a block's border."""
    if any(len(part.data) % SCALED for part in parts[:-1]):
        return None
    data = torch.cat([part.data.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Fp8Weight(data, torch.cat([part.scale for part in parts]))


def quantised_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """x [..., I] times a matrix of fp8 in torch: [..., O] in x's dtype, few rows in fp32."""
    if x.numel() // x.shape[-1] <= FP8_ROWS:
        return few_rows(x, weight, bias)
    return F.linear(x, weight.plain().to(x.dtype), bias)


def to_int(weight: Tensor, kind: str) -> Tensor:
    """A matrix as torchao's weight-only tensor, which `F.linear` knows.

    Raises:
        CheckpointError: torchao cannot do this on the weight's device or in its dtype.
    """
    quantize, config = _torchao(kind)
    if kind == "int4" and weight.device.type == "cpu":
        raise CheckpointError(
            "quantize=int4 needs a GPU, and the weights are on the CPU; use quantize=int8, fp8 or "
            "none there"
        )
    module = torch.nn.Linear(1, 1, bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.out_features, module.in_features = weight.shape
    try:
        with torch.no_grad():
            quantize(module, config())
    except Exception as error:
        where = f"{weight.dtype} on {weight.device.type}".removeprefix("torch.")
        raise CheckpointError(
            f"torchao cannot make quantize={kind} of {where} ({error}); use quantize=fp8 or none"
        ) from error
    return module.weight.detach()


def _torchao(kind: str) -> tuple[Callable, Callable[[], Any]]:
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise CheckpointError(
            f"quantize={kind} needs torchao, which is not installed; `pip install torchao`, or "
            "use quantize=fp8"
        ) from error
    if kind == "int8":
        return quantize_, partial(Int8WeightOnlyConfig, set_inductor_config=False)
    return quantize_, partial(
        Int4WeightOnlyConfig,
        group_size=GROUP,
        int4_packing_format="tile_packed_to_4d",
        set_inductor_config=False,
    )
