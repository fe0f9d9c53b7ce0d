"""What the memory gives to a kernel that only reads: the floor that every op is held against."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

READ_BYTES = 4 * 2**30  # far past any second-level cache
WORDS = 16384  # of one program


@triton.jit
def _read(
    words_ptr,  # [num_programs * WORDS * PASSES] int32
    out_ptr,  # [num_programs] int32
    WORDS: tl.constexpr,
    PASSES: tl.constexpr,
    STEP: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.int32)
    for start in tl.static_range(0, WORDS * PASSES, STEP):
        total += tl.load(words_ptr + program * (WORDS * PASSES) + start + index)
    tl.store(out_ptr + program, tl.sum(total, axis=0))


def read_bandwidth(num_bytes: int = READ_BYTES, rounds: int = 10) -> float:
    """Bytes a second of the current CUDA device, the best of a few shapes of one reading kernel."""
    words = torch.randint(-100, 100, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    best = 0.0
    for passes, step, num_warps in ((1, 4096, 4), (1, 8192, 8), (4, 4096, 4), (4, 8192, 8)):
        num_programs = len(words) // (WORDS * passes)
        out = torch.empty(num_programs, dtype=torch.int32, device="cuda")
        launch: Any = _read[(num_programs,)]
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch(words, out, WORDS=WORDS, PASSES=passes, STEP=step, num_warps=num_warps)
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
            best = max(best, num_programs * WORDS * passes * 4 / seconds)
    return best
