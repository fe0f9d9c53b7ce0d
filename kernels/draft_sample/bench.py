"""Drafts from a draft head's logits, which its product has just written."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec.kernels.bench import Case
from specdec.kernels.draft_sample import kernel, reference
from specdec.kernels.draft_sample.reference import KeptRows

CASES = (
    ("greedy", False),
    ("sample", False),
    ("sample", True),
    ("shared", False),
)


def cases(device: torch.device) -> list[Case]:
    """Every mode over an own head of 32000 rows and a shared one of 128256, in bf16."""
    made = []
    for rows, vocab_size in ((1, 32000), (64, 32000), (1, 128256), (64, 128256), (256, 128256)):
        logits = (torch.randn(rows, vocab_size, device=device) * 3).bfloat16()
        d2t = torch.arange(vocab_size, device=device) * 4 if vocab_size < 128256 else None
        kept = [torch.empty(rows, device=device) for _ in range(4)]
        keep = KeptRows(torch.empty_like(logits), *kept, torch.arange(rows, device=device))
        for mode, filters in CASES:
            sampling = (
                torch.full((rows,), 0.8, device=device),
                torch.full((rows,), 50 if filters else 0, device=device),
                torch.full((rows,), 0.9 if filters else 1.0, device=device),
                torch.zeros(rows, device=device),
            )
            options: dict[str, Any] = {
                "vocab_size": vocab_size,
                "epsilon": 1e-5,
                "seeds": torch.arange(rows, device=device),
                "round_start": torch.arange(rows, device=device) + 100,
                "offset": 1,
                "purpose": 0,
                "mode": mode,
                "d2t": d2t,
                "filters": filters,
                "keep": keep if mode == "sample" else None,
            }
            name = f"{mode}{', top-k 50 + top-p 0.9' if filters else ''}, {rows} x {vocab_size}"
            made.append(
                Case(
                    name,
                    partial(kernel.draft_sample_, logits, *sampling, **options),
                    logits.nbytes * (2 if mode == "sample" else 1),  # q keeps a copy
                    partial(reference.draft_sample_, logits, *sampling, **options)
                    if rows <= 64
                    else None,
                )
            )
    return made
