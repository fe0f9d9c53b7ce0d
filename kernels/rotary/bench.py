"""Tables of an 8B model's rotation, once a pass."""

from __future__ import annotations

from functools import partial

import torch

from specdec.kernels.bench import Case
from specdec.kernels.rotary import kernel, reference

HALF = 64


def cases(device: torch.device) -> list[Case]:
    inv_freq = 500000.0 ** -(torch.arange(HALF, device=device) / HALF)
    made = []
    for rows in (1, 4, 256, 4096):
        positions = torch.randint(8192, (rows,), device=device)
        args = (inv_freq, positions, torch.bfloat16)
        made.append(
            Case(
                f"8B, {rows} rows",
                partial(kernel.rotary_tables, *args),
                inv_freq.nbytes + positions.nbytes + rows * HALF * 8,
                partial(reference.rotary_tables, *args),
            )
        )
    return made
