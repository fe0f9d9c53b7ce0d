"""Tables of rotary positions (arXiv 2104.09864) in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    inv_freq: Tensor, positions: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions [...] times inv_freq [D / 2], times scale, computed in fp32.

    Returns:
        (cos, sin), each [..., 1, D] in `dtype`: both halves alike but for the sign of `sin`, which
        is negated in the first.
    """
    angle = positions.to(torch.float32)[..., None, None] * inv_freq  # [..., 1, D / 2]
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)
