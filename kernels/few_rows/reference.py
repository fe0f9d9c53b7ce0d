"""Products of few rows with a large matrix, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.gated_act.reference import gated_act


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [..., K] times [N, K] gives [..., N]."""
    return F.linear(x, weight, bias)


def few_rows_gated(x: Tensor, gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of the product [..., 2 N] = [gate | up]: [..., K] to [..., N].

    The product and silu are rounded to the dtype, as they are where each is an op of its own.
    """
    return gated_act(F.linear(x, gate_up, bias))
