"""Norms at the widths of an 8B model and its draft head; their inputs were written just before."""

from __future__ import annotations

from functools import partial

import torch

from specdec.kernels.add_norm import kernel, reference
from specdec.kernels.bench import Case

ROWS = (1, 4, 16, 64, 256)
SIZE = 4096
EPS = 1e-5


def cases(device: torch.device) -> list[Case]:
    """`add_norm` in bf16, the pair of an Eagle-3 head, and the heads of Qwen3."""
    made = []
    weight, other = torch.randn(2, SIZE, device=device).bfloat16()
    for rows in ROWS:
        hidden, residual = torch.randn(2, rows, SIZE, device=device).bfloat16()
        adds = (hidden, residual, weight, EPS)
        pair = (hidden, residual, weight, other, EPS)
        made.append(
            Case(
                f"add_norm, {rows} rows",
                partial(kernel.add_norm, *adds),
                4 * hidden.nbytes + weight.nbytes,
                partial(reference.add_norm, *adds),
            )
        )
        made.append(
            Case(
                f"norm_pair, {rows} rows",
                partial(kernel.norm_pair, *pair),
                4 * hidden.nbytes + 2 * weight.nbytes,
                partial(reference.norm_pair, *pair),
            )
        )
        heads = torch.randn(rows, 48, 128, device=device).bfloat16()[:, :32]
        normed = (heads, weight[:128], EPS)
        made.append(
            Case(
                f"rms_norm of 32 heads, {rows} rows",
                partial(kernel.rms_norm, *normed),
                2 * heads.numel() * heads.element_size(),
                partial(reference.rms_norm, *normed),
            )
        )
    return made
