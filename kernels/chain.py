"""Kernels that start while the one before them still runs: programmatic dependent launch.

A kernel launched with `overlapped()` may start as soon as every program of the kernel before it in
the stream has called `gdc_launch_dependents` or ended. What makes that safe, in every kernel that
is launched so:

* It calls `gdc_launch_dependents` first, so that the next kernel may come in beside it, or later
  where programs that only wait would take room from its own.
* Before `gdc_wait` it reads only what no kernel of a step writes (weights, biases, norms) or what
  was complete before the last ordinary launch in the stream. There it asks for them, so that memory
  is busy while the kernels before it run out.
* It calls `gdc_wait` before its first read of anything else, and before its first write of any
  kind: its output may lie in memory that an earlier kernel still reads. `gdc_wait` returns when
  the kernel before has ended and what it wrote is visible.
* It calls `gdc_wait` in every program, also in one that then has nothing to do. Kernels further
  back are known to have ended only because the one before waited for them in turn.

A kernel launched without `overlapped()` starts when all before it have ended, as ever, and may
stand anywhere in such a chain. A kernel that follows some copy of weights into place (loading,
training) must not be overlapped with it; the engine never changes weights in a step.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from specdec.kernels.runtime import interpreting


@cache
def can_overlap() -> bool:
    """Whether the current device has it (compute capability 9.0); never in the interpreter."""
    if interpreting() or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def overlapped() -> dict[str, bool]:
    """Options of an overlapped launch: the constant OVERLAP, and launch_pdl where it is True."""
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap() else {"OVERLAP": False}


@triton.jit
def ask_for(address):
    """Brings the lines at these addresses into the second-level cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_for_bytes(address, size):
    """As `ask_for`, `size` bytes from each address on: one order for what would be many lines.

    Address and size are multiples of 16; all of the bytes must be there to read.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
