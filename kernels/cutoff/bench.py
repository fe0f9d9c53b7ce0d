"""Filters over logits as a language-model head leaves them, against the sort that defines them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.bench import Case
from specdec.kernels.cutoff import kernel, reference

VOCAB_SIZE = 128256
CACHE_BYTES = 128 << 20  # of logits in turn, so that none of them is in the L2 cache
KNOWN: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "epsilon": 1e-5, "invalid": -2}
FILTERS = (
    ("top-k 50, top-p 0.9", 50, 0.9, 0.0, 3.0),
    ("top-k 50", 50, 1.0, 0.0, 3.0),
    ("top-p 0.9", 0, 0.9, 0.0, 6.0),
    ("top-p 0.9, flat rows", 0, 0.9, 0.0, 1.0),
    ("min-p 0.05", 0, 1.0, 0.05, 3.0),
    ("none", 0, 1.0, 0.0, 3.0),
)


def cases(device: torch.device) -> list[Case]:
    """`filtered_rows` in bf16; the spread of the logits says how much the candidates hold."""
    made = []
    for rows in (4, 256):
        size = rows * VOCAB_SIZE * 2
        copies = -(-CACHE_BYTES // size)
        noise = torch.randn(copies, rows, VOCAB_SIZE, device=device)
        for name, top_k, top_p, min_p, scale in FILTERS:
            sets = list((noise * scale).bfloat16())
            sampling = (
                torch.full((rows,), 0.8, device=device),
                torch.full((rows,), top_k, device=device),
                torch.full((rows,), top_p, device=device),
                torch.full((rows,), min_p, device=device),
            )
            run = _in_turn(kernel.filtered_rows, sets, sampling)
            baseline = _in_turn(reference.filtered_rows, sets, sampling) if rows == 4 else None
            made.append(Case(f"{name}, {rows} rows", run, size, baseline))
    return made


def _in_turn(
    function: Callable[..., object], sets: list[Tensor], sampling: tuple[Tensor, ...]
) -> Callable[[], object]:
    turns = cycle(sets)
    filtered = partial(function, **KNOWN)
    return lambda: filtered(next(turns), *sampling)
