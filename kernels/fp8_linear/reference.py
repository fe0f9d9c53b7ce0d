"""Products with a matrix kept in fp8 with one scale for each block of 128 x 128 weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensor:
    """weight [..., O, I] times the factor of each block, in fp32.

    Args:
        scale: [..., ceil(O / block[0]), ceil(I / block[1])].
    """
    factors = scale.float()
    for dim, step in zip((-2, -1), block, strict=True):
        factors = factors.repeat_interleave(step, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float().mul_(factors)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ (weight * scale).T + bias, summed in fp32, in x's dtype.

    Args:
        x: [T, I].
        weight: [O, I] float8_e4m3fn.
        scale: [ceil(O / 128), ceil(I / 128)] fp32.
        bias: [O] or None.
    """
    bias = None if bias is None else bias.float()
    return F.linear(x.float(), dequantise(weight, scale), bias).to(x.dtype)
