"""The gated activation of a feed-forward part, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_act(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 I] = [gate | up] -> [..., I], each step rounded to the dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
