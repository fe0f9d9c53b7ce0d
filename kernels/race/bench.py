"""Gumbel races over bf16 logits; making the noise, not reading, sets the time of many rows."""

from __future__ import annotations

from functools import partial

import torch

from specdec.kernels.bench import Case
from specdec.kernels.race import kernel
from specdec.kernels.row_stats.kernel import row_stats


def cases(device: torch.device) -> list[Case]:
    """Rows of the target's size."""
    made = []
    for rows, vocab_size in ((4, 128256), (64, 128256), (256, 128256)):
        logits = torch.empty(rows, vocab_size, dtype=torch.bfloat16, device=device).normal_()
        temperature = torch.full((rows,), 0.8, device=device)
        stats = row_stats(logits, temperature, vocab_size=vocab_size, epsilon=1e-5, invalid=-2)
        index = torch.arange(rows, device=device)
        run = partial(
            kernel.race,
            logits,
            *stats[:3],
            stats.greedy,
            stats.argmax,
            vocab_size=vocab_size,
            seeds=index,
            round_start=index + 9,
            purpose=4,
        )
        made.append(Case(f"{rows} x {vocab_size}", run, logits.nbytes))
    return made
