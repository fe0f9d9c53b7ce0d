"""Grammar masks that leave few ids, over the rows of 64 requests with K = 3."""

from __future__ import annotations

from functools import partial

import torch

from specdec.kernels.bench import Case
from specdec.kernels.bitmask import kernel, reference

VOCAB_SIZE = 128256


def cases(device: torch.device) -> list[Case]:
    """Logits in bf16; a bit in 32 is set."""
    made = []
    for rows in (4, 256):
        logits = torch.randn(rows, VOCAB_SIZE, device=device).bfloat16()
        bits = torch.randint(0, 32, (rows, VOCAB_SIZE // 32), device=device)
        bitmask = (1 << bits).to(torch.int32)
        run, baseline = (
            partial(op.apply_bitmask_, logits, bitmask, vocab_size=VOCAB_SIZE)
            for op in (kernel, reference)
        )
        made.append(Case(f"bitmask, {rows} rows", run, logits.nbytes + bitmask.nbytes, baseline))
    return made
