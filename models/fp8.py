"""Block-scaled fp8 weights of a checkpoint (arXiv 2412.19437, section 3.3.2).

`X.weight` in fp8 has `X.weight_scale_inv` beside it: one fp32 factor for each block of 128 x 128
weights, blocks at the right and lower edge cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.kernels.few_rows.reference import SCALED, dequantise

SCALE = "_scale_inv"
BLOCK = (SCALED, SCALED)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Shape = tuple[int, ...]
ReadScaled = Callable[[], tuple[Tensor, Tensor]]  # -> weights in fp8, scales
Readers = Mapping[str, tuple[Shape, Callable[[], Tensor]]]  # name -> (shape, read)


def dequantised(tensors: Readers, where: Path, settings: Mapping[str, Any]) -> Readers:
    """The tensors of a checkpoint with scaled weights read in fp32 and their scales left out.

    A checkpoint without scales is returned as it is.

    Args:
        settings: config.json; its `quantization_config.weight_block_size` is the block.

    Raises:
        CheckpointError: here for a scale that fits no weight, on reading for a weight in fp8
            without a scale.
    """
    quantised = settings.get("quantization_config") or {}
    scales = [name for name in tensors if name.endswith(SCALE)]
    if not scales and quantised.get("quant_method") != "fp8":
        return tensors
    block = _block_size(quantised, where)
    weights = {name.removesuffix(SCALE): name for name in scales}
    for name, scale in weights.items():
        if name not in tensors:
            raise CheckpointError(f"{where} has {scale} without {name}")
        shape = tensors[name][0]
        blocks = tuple(-(-size // step) for size, step in zip(shape[-2:], block, strict=True))
        if tensors[scale][0] != (*shape[:-2], *blocks):
            raise CheckpointError(
                f"{where}: {scale} is {list(tensors[scale][0])}; {name} of {list(shape)} in "
                f"blocks of {block[0]} x {block[1]} means {[*shape[:-2], *blocks]}"
            )

    def reader(name: str, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if name in weights:
            return lambda: dequantise(read(), tensors[weights[name]][1](), block)
        return lambda: _plain(read(), name, where)

    return {
        name: (shape, reader(name, read))
        for name, (shape, read) in tensors.items()
        if not name.endswith(SCALE)
    }


def _block_size(quantised: Mapping[str, Any], where: Path) -> tuple[int, int]:
    value = quantised.get("weight_block_size") or BLOCK
    if isinstance(value, (list, tuple)) and len(value) == 2:
        rows, columns = value
        if all(type(size) is int and size > 0 for size in (rows, columns)):
            return rows, columns
    raise CheckpointError(
        f"{where}: quantization_config.weight_block_size={value!r} is not two positive integers"
    )


def block_scaled(tensors: Readers, settings: Mapping[str, Any]) -> dict[str, ReadScaled]:
    """The weights of a checkpoint that have a scale for each block of 128 x 128, as they lie."""
    quantised = settings.get("quantization_config") or {}
    if (quantised.get("weight_block_size") or BLOCK) not in (BLOCK, list(BLOCK)):
        return {}

    def reader(name: str) -> ReadScaled:
        return lambda: (tensors[name][1](), tensors[name + SCALE][1]())

    return {name: reader(name) for name in tensors if name + SCALE in tensors}


def _plain(tensor: Tensor, name: str, where: Path) -> Tensor:
    if tensor.dtype in FLOAT8:
        raise CheckpointError(f"{where}: {name} is in {tensor.dtype} without its {name}{SCALE}")
    return tensor
