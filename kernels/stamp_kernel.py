"""The kernel behind `stamps`: one thread reads the GPU's clock of nanoseconds."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit(do_not_specialize=["mark"])
def stamp(
    marks_ptr,  # [capacity, 2]
    count_ptr,  # [1]
    mark,
    capacity,
):
    now = cuda.globaltimer()
    count = tl.load(count_ptr)
    line = marks_ptr + count % capacity * 2
    tl.store(line, mark.to(tl.int64))
    tl.store(line + 1, now)
    tl.store(count_ptr, count + 1)
