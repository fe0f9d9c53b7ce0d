"""Parameter trees described by the checkpoint tensors they are made of.

A layout is a parameter tree with a `Part` in the place of each tensor: the same description checks
a checkpoint's names, reads it, and writes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.few_rows.reference import Fp8Weight
from specdec.models.checkpoint import Checkpoint, check_names, read_part
from specdec.models.quantize import keeps_fp8, stack_fp8

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One parameter: tensors of a checkpoint stacked along their rows, then viewed as `shape`."""

    names: Mapping[str, Shape]  # checkpoint name -> shape there
    shape: Shape | None = None  # None: as stacked
    dtype: torch.dtype | None = None  # None: the model's
    order: Callable[[], Tensor] | None = None  # which stacked row each row is; None: the same

    @property
    def full_shape(self) -> Shape:
        shapes = list(self.names.values())
        return self.shape or (sum(shape[0] for shape in shapes), *shapes[0][1:])


def part(name: str, *shape: int, dtype: torch.dtype | None = None) -> Part:
    """A parameter that is one tensor of the checkpoint."""
    return Part({name: shape}, dtype=dtype)


def map_parts(fn: Callable[[Part], Any], layout: Any) -> Any:
    """`fn` of every part of nested tuples and NamedTuples; None and anything else is kept."""
    if isinstance(layout, Part):
        return fn(layout)
    if isinstance(layout, tuple):
        items = [map_parts(fn, item) for item in layout]
        return type(layout)(*items) if hasattr(layout, "_fields") else tuple(items)
    return layout


def parts_of(layout: Any) -> list[Part]:
    """The parts of a layout in field order."""
    parts: list[Part] = []
    map_parts(lambda part: parts.append(part), layout)
    return parts


def shapes_of(layout: Any) -> dict[str, Shape]:
    """Every checkpoint tensor that a layout needs, with its shape."""
    return {name: tuple(s) for part in parts_of(layout) for name, s in part.names.items()}


def check_layout(checkpoint: Checkpoint, layout: Any, redundant: Iterable[str] = ()) -> None:
    """As `check_names`, for the tensors of a layout."""
    check_names(checkpoint, [{"": part.names} for part in parts_of(layout)], redundant)


def read_layout(
    checkpoint: Checkpoint, layout: Any, device: torch.device | str, dtype: torch.dtype
) -> Any:
    """The parameter tree of a layout, each tensor copied into its place as it is read."""

    def read(part: Part) -> Tensor | Fp8Weight:
        if keeps_fp8() and (kept := _read_fp8(checkpoint, part, device)) is not None:
            return kept
        stacked = read_part(checkpoint, part.names, device, part.dtype or dtype)
        if part.order is not None:
            stacked = stacked.index_select(0, part.order().to(device))
        return stacked.view(part.full_shape)

    return map_parts(read, layout)


def _read_fp8(checkpoint: Checkpoint, part: Part, device: torch.device | str) -> Fp8Weight | None:
    """A matrix as it lies in an fp8 checkpoint; None where it does not or cannot be kept so."""
    plain = part.shape is None and part.order is None and part.dtype is None
    scaled = getattr(checkpoint, "scaled", {})
    if not plain or any(name not in scaled for name in part.names):
        return None
    pieces = []
    for name in part.names:
        data, scale = scaled[name]()
        if data.dtype != torch.float8_e4m3fn or data.dim() != 2:
            return None
        pieces.append(Fp8Weight(data.to(device), scale.to(device, torch.float32)))
    return stack_fp8(pieces)


def named_tensors(params: Any, layout: Any) -> dict[str, Tensor]:
    """The inverse of `read_layout` for a tree of plain tensors: checkpoint name -> tensor."""
    tensors: dict[str, Tensor] = {}
    for tensor, part in _pairs(params, layout):
        flat = tensor.reshape(-1, prod(next(iter(part.names.values()))[1:]))
        if part.order is not None:
            flat = flat.index_select(0, part.order().argsort().to(flat.device))
        start = 0
        for name, shape in part.names.items():
            tensors[name] = flat[start : start + shape[0]].reshape(shape)
            start += shape[0]
    return tensors


def _pairs(params: Any, layout: Any) -> Iterator[tuple[Tensor, Part]]:
    if isinstance(layout, Part):
        yield params, layout
    elif isinstance(layout, tuple):
        for tensor, part in zip(params, layout, strict=True):
            yield from _pairs(tensor, part)
