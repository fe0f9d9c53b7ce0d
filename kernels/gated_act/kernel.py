"""The gated activation in one pass."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.add_norm.kernel import rows_of
from specdec.kernels.chain import overlapped

BLOCK = 1024


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of fp32 values, rounded to `dtype` after each step, as fp32."""
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype).to(tl.float32)


@triton.jit
def _gated_act(
    gate_up_ptr,  # [rows, 2 I] at its stride
    out_ptr,  # [rows, I]
    stride,
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < I
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    start = gate_up_ptr + row * stride
    gate = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + I + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * I + at, silu_times(gate, up, dtype).to(dtype), mask=inside)


def gated_act(gate_up: Tensor) -> Tensor:
    """As `reference.gated_act`."""
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    rows = rows_of(gate_up)
    if not len(rows):
        return out
    launch: Any = _gated_act[(len(rows), triton.cdiv(inner, BLOCK))]
    launch(rows, out, rows.stride(0), I=inner, BLOCK=BLOCK, num_warps=4, **overlapped())
    return out
