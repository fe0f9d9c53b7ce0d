"""Row statistics of bf16 logits: one read, and how much of it a few rows keep busy."""

from __future__ import annotations

from functools import partial

import torch

from specdec.kernels.bench import Case
from specdec.kernels.row_stats import kernel, reference

KNOWN = {"epsilon": 1e-5, "invalid": -2}


def cases(device: torch.device) -> list[Case]:
    """Sampled and greedy rows at the sizes of a step of 1, 64 and 256 requests."""
    made = []
    for rows, vocab_size in ((1, 32000), (4, 128256), (64, 32000), (256, 128256), (2048, 128256)):
        logits = torch.empty(rows, vocab_size, dtype=torch.bfloat16, device=device).normal_()
        temperature = torch.full((rows,), 0.8, device=device)
        for all_greedy in (False, True):
            options = {"vocab_size": vocab_size, "all_greedy": all_greedy, **KNOWN}
            made.append(
                Case(
                    f"{'greedy' if all_greedy else 'sampled'}, {rows} x {vocab_size}",
                    partial(kernel.row_stats, logits, temperature, **options),
                    logits.nbytes,
                    None
                    if rows > 256
                    else partial(reference.row_stats, logits, temperature, **options),
                )
            )
    return made
