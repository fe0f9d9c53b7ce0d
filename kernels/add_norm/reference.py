"""RMS norms of a residual stream that has just grown, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in fp32, returned in x's dtype.

    Args:
        zero_centred: multiply by 1 + weight.
    """
    if zero_centred:
        return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of hidden + residual [..., H], and that sum, rounded to their dtype.

    With `residual` None the sum is `hidden` itself.
    """
    summed = hidden if residual is None else hidden + residual
    return rms_norm(summed, weight, eps, zero_centred), summed


def norm_pair(
    first: Tensor,
    second: Tensor,
    first_weight: Tensor,
    second_weight: Tensor,
    eps: float,
    zero_centred: bool = False,
) -> Tensor:
    """Both norms side by side: [..., H] and [..., H] give [..., 2 H]."""
    return torch.cat(
        (
            rms_norm(first, first_weight, eps, zero_centred),
            rms_norm(second, second_weight, eps, zero_centred),
        ),
        dim=-1,
    )
