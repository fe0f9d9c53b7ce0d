"""Products of few rows with a large matrix, and what may end one: in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.gated_act.reference import gated_act

SCALED = 128  # rows, and columns, of fp8 weights that share a scale


class Normed(NamedTuple):
    """An RMS norm whose division is left to the products that read it.

    A row's norm is rows / sqrt(mean square + eps): a factor of a product's whole row, so that who
    makes `rows` need not have seen all of the stream.
    """

    rows: Tensor  # [..., H] the stream times the norm's weight, rounded
    squares: Tensor  # [T, n] fp32: a row's sum is that of the squares of its stream
    eps: float

    def scale(self) -> Tensor:
        """[..., 1] fp32 that the rows are still to be multiplied by."""
        *leading, size = self.rows.shape
        return torch.rsqrt(self.squares.sum(-1) / size + self.eps).view(*leading, 1)


class Fp8Weight(NamedTuple):
    """A matrix in fp8 with one scale for each block of 128 x 128 weights; none of them is NaN."""

    data: Tensor  # [N, K] float8_e4m3fn
    scale: Tensor  # [ceil(N / 128), ceil(K / 128)] fp32, contiguous

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def plain(self) -> Tensor:
        """[N, K] fp32."""
        return dequantise(self.data, self.scale)


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int] = (SCALED, SCALED)) -> Tensor:
    """weight [..., N, K] times the factor of each block, in fp32.

    Args:
        scale: [..., ceil(N / block[0]), ceil(K / block[1])].
    """
    factors = scale.float()
    for dim, step in zip((-2, -1), block, strict=True):
        factors = factors.repeat_interleave(step, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float().mul_(factors)


def rows_in(x: Tensor | Normed) -> Tensor:
    """The rows that a product reads, whatever is left to do to it."""
    return x.rows if isinstance(x, Normed) else x


def few_rows(x: Tensor | Normed, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [..., K] times [N, K] gives [..., N], summed in fp32."""
    rows, scale = (x.rows, x.scale()) if isinstance(x, Normed) else (x, 1.0)
    matrix = weight.plain() if isinstance(weight, Fp8Weight) else weight.float()
    out = rows.float() @ matrix.T * scale
    return (out if bias is None else out + bias.float()).to(rows.dtype)


def few_rows_gated(
    x: Tensor | Normed, gate_up: Tensor | Fp8Weight, bias: Tensor | None = None
) -> Tensor:
    """silu(gate) * up of the product [..., 2 N] = [gate | up]: [..., K] to [..., N].

    The product and silu are rounded to the dtype, as they are where each is an op of its own.
    """
    return gated_act(few_rows(x, gate_up, bias))


def few_rows_add_norm(
    x: Tensor | Normed,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
) -> tuple[Normed, Tensor]:
    """The stream that a product [..., H] is added to, with its norm: (normed, summed).

    Args:
        residual: [..., H] the stream before.
        norm: [H] the norm's weight.
    """
    summed = few_rows(x, weight, bias) + residual
    stream = summed.float()
    squares = stream.square().sum(-1).view(-1, 1)
    return Normed((stream * norm.float()).to(summed.dtype), squares, eps), summed
