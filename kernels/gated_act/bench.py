"""The activation at the width of an 8B model; its input was written just before."""

from __future__ import annotations

from functools import partial

import torch

from specdec.kernels.bench import Case
from specdec.kernels.gated_act import kernel, reference

ROWS = (1, 4, 16, 64, 256)
INNER = 14336


def cases(device: torch.device) -> list[Case]:
    """`gated_act` in bf16."""
    made = []
    for rows in ROWS:
        gate_up = torch.randn(rows, 2 * INNER, device=device).bfloat16()
        made.append(
            Case(
                f"{rows} rows",
                partial(kernel.gated_act, gate_up),
                gate_up.nbytes * 3 // 2,
                partial(reference.gated_act, gate_up),
            )
        )
    return made
