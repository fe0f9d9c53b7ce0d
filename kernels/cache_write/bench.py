"""Rotation and cache write of an 8B model's layer."""

from __future__ import annotations

from functools import partial

import torch

from specdec.kernels.bench import Case
from specdec.kernels.cache_write import kernel, reference
from specdec.kernels.cache_write.reference import HeadNorms

HEADS, KV_HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 32, 8, 128, 16, 4096


def cases(device: torch.device) -> list[Case]:
    """What feeds this op was written just before, so inputs are found in the cache."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    keys, values = (random(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, DIM) for _ in range(2))
    norms = HeadNorms(random(DIM), random(DIM), 1e-6)
    made = []
    for rows in (1, 4, 32, 256, 2048):
        for name, given in (("", None), (" with norms", norms)):
            qkv = random(rows, HEADS + 2 * KV_HEADS, DIM)
            cos, sin = random(rows, 1, DIM), random(rows, 1, DIM)
            slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=device)[:rows]
            args = (keys, values, qkv, cos, sin, slots, given)
            made.append(
                Case(
                    f"8B{name}, {rows} rows",
                    partial(kernel.cache_write_, *args),
                    2 * qkv.nbytes + cos.nbytes + sin.nbytes + slots.nbytes,
                    partial(reference.cache_write_, *args),
                )
            )
    return made
