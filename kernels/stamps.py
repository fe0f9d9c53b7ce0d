"""Time stamps that a kernel writes: they work inside CUDA graphs and need no profiler.

A stamp runs when everything before it on the stream is done, so the difference of two is the time
between them, gaps and the stamp itself included.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

CAPACITY = 1 << 16


class Stamps(NamedTuple):
    """A ring of (mark, nanoseconds), on the device whose work is timed."""

    marks: Tensor  # [CAPACITY, 2] int64
    written: Tensor  # [1] int64, how many there ever were


def new_stamps(device: torch.device | str, capacity: int = CAPACITY) -> Stamps:
    return Stamps(
        torch.zeros(capacity, 2, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )


def stamp_(stamps: Stamps, mark: int) -> None:
    """Append a stamp: by a kernel on a GPU, by the host's clock elsewhere."""
    if stamps.written.is_cuda:
        from specdec.kernels.stamp_kernel import stamp

        launch: Any = stamp[(1,)]
        launch(stamps.marks, stamps.written, mark, len(stamps.marks), num_warps=1)
        return
    at = int(stamps.written) % len(stamps.marks)
    stamps.marks[at, 0], stamps.marks[at, 1] = mark, time.perf_counter_ns()
    stamps.written.add_(1)


def reset_(stamps: Stamps) -> None:
    """Forget all stamps."""
    stamps.written.zero_()


def read(stamps: Stamps) -> list[tuple[int, int]]:
    """(mark, nanoseconds) in order, the oldest that the ring still holds first. Waits."""
    count, capacity = int(stamps.written), len(stamps.marks)
    rows = stamps.marks.tolist()
    if count <= capacity:
        return [(mark, at) for mark, at in rows[:count]]
    start = count % capacity
    return [(mark, at) for mark, at in rows[start:] + rows[:start]]
