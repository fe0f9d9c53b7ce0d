"""Penalties of the rows of 1 and 64 requests with K = 3."""

from __future__ import annotations

from functools import partial

import torch

from specdec.kernels.bench import Case
from specdec.kernels.penalties import kernel, reference

VOCAB_SIZE, NUM_DRAFTS = 128256, 3


def cases(device: torch.device) -> list[Case]:
    """Logits in fp32; 500 ids of each request stand in its prompt or output."""
    made = []
    for requests in (1, 64):
        slots = torch.arange(requests, device=device)
        starts = torch.arange(requests + 1, device=device) * (NUM_DRAFTS + 1)
        counts = torch.zeros(requests, VOCAB_SIZE, dtype=torch.int32, device=device)
        counts[:, torch.randperm(VOCAB_SIZE, device=device)[:500]] = 3
        logits = torch.randn(requests * (NUM_DRAFTS + 1), VOCAB_SIZE, device=device)
        drafts = torch.randint(0, VOCAB_SIZE, (requests, NUM_DRAFTS), device=device)
        factors = (torch.full((requests,), value, device=device) for value in (1.1, 0.2, 0.1))
        arguments = (logits, counts, drafts, slots, starts, *factors)
        run, baseline = (
            partial(op.apply_penalties_, *arguments, vocab_size=VOCAB_SIZE)
            for op in (kernel, reference)
        )
        size = requests * VOCAB_SIZE * 4  # counts of a request; few logits change
        made.append(Case(f"penalties, {len(logits)} rows", run, size, baseline))
    return made
