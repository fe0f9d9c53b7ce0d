"""Products of few rows with a large matrix: every weight is read once, at the rate of memory.

Each program streams the rows of its own outputs. Between products memory would stand still while
one kernel runs out and the next fills up, so kernels may overlap (`specdec.kernels.chain`): a
program then asks for its first weights before it waits for the activations that they multiply. How
many it asks for, and whether the next kernel may come in at once or only when the weights of this
one have been read, are figures of a plan, because programs that wait take room and memory's time
from those that work.

Where several programs share an output, each leaves its partial sums and the last to arrive adds
them, always in the same order. Arrivals are counted in memory that every call finds at zero and
leaves at zero; calls on the same device must follow each other, as on one stream.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.add_norm.kernel import rows_of
from specdec.kernels.chain import ask_for, overlapped
from specdec.kernels.few_rows.plan import Plan, product_plan
from specdec.kernels.gated_act.kernel import silu_times
from specdec.kernels.runtime import interpreting

MAX_TILES = 1 << 16  # groups of outputs that programs can share
FALLBACK = Plan(cols=32, step=64, split=1, warps=4, stages=3)


@triton.jit
def _ask_for_rows(rows_ptr, first, K: tl.constexpr, COUNT: tl.constexpr, LINE: tl.constexpr):
    """COUNT elements from `first` on of each row, LINE a time; nothing past the row's K."""
    at = tl.minimum(first + tl.arange(0, COUNT // LINE) * LINE, K - 1)
    ask_for(rows_ptr[:, None] + at[None, :])


@triton.jit
def _weights(rows_ptr, at, K: tl.constexpr, INSIDE: tl.constexpr, UPCAST: tl.constexpr):
    """[K part, outputs]: elements `at` of each row; masked where they may lie past K."""
    if INSIDE:
        weights = tl.load(rows_ptr[None, :] + at[:, None])
    else:
        weights = tl.load(rows_ptr[None, :] + at[:, None], mask=(at < K)[:, None], other=0.0)
    return weights.to(tl.float32) if UPCAST else weights


@triton.jit
def _activations(rows_ptr, at, is_row, K: tl.constexpr, INSIDE: tl.constexpr, UPCAST: tl.constexpr):
    """[rows, K part]; masked as `_weights`."""
    mask = is_row[:, None]
    if not INSIDE:
        mask = mask & (at < K)[None, :]
    x = tl.load(rows_ptr[:, None] + at[None, :], mask=mask, other=0.0)
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def _of_outputs(weights, col, N: tl.constexpr):
    """[K part, outputs] with zeros for outputs past N."""
    return tl.where((col < N)[None, :], weights, 0.0)


@triton.jit
def _sum_of_parts(place, size, is_out, SPLIT: tl.constexpr):
    total = tl.load(place, mask=is_out, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, SPLIT):
        total += tl.load(place + part * size, mask=is_out, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _finish(
    out_ptr, bias_ptr, gate, up, row, col, is_out, N, GATED: tl.constexpr, BIASED: tl.constexpr
):
    dtype = out_ptr.dtype.element_ty
    if BIASED:
        gate += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    out = gate
    if GATED:
        if BIASED:
            up += tl.load(bias_ptr + N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        out = silu_times(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
    place = out_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(place, out.to(dtype), mask=is_out)


@triton.jit
def _few_rows(
    x_ptr,  # [num_rows, K] at its stride
    weight_ptr,  # [N, K]; gated [2 N, K]
    bias_ptr,  # [N]; gated [2 N]
    out_ptr,  # [num_rows, N]
    partial_ptr,  # [SPLIT, num_rows, N] fp32; gated [2, SPLIT, num_rows, N]
    arrived_ptr,  # [tiles] int32, zeros
    num_rows,
    X_STRIDE: tl.constexpr,  # a constant, so that 16 bytes of a row are one copy
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
    HELD: tl.constexpr,
    LATE: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    steps: tl.constexpr = ((K + STEP - 1) // STEP + SPLIT - 1) // SPLIT
    inside: tl.constexpr = K % (STEP * SPLIT) == 0
    row = tl.arange(0, ROWS)
    col = tile * COLS + tl.arange(0, COLS)
    k = tl.arange(0, STEP)
    first = part * (steps * STEP)
    is_row = row < num_rows
    # outputs past the last repeat its row, and are not stored
    weight_rows = weight_ptr + tl.minimum(col, N - 1).to(tl.int64) * K
    x_rows = x_ptr + row.to(tl.int64) * X_STRIDE
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        if AHEAD > 0:
            # elements of the 128 bytes that one prefetch brings
            line: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
            _ask_for_rows(weight_rows, first, K, AHEAD * STEP, line)
            if GATED:
                _ask_for_rows(weight_rows + N * K, first, K, AHEAD * STEP, line)
    if HELD > 0:  # on their way into registers while the kernel before runs out
        held_at = first + tl.arange(0, HELD * STEP)
        held_gate = _weights(weight_rows, held_at, K, inside, UPCAST)
        if GATED:
            held_up = _weights(weight_rows + N * K, held_at, K, inside, UPCAST)
    if OVERLAP:
        gdc_wait()
    if HELD > 0:
        held_x = _activations(x_rows, held_at, is_row, K, inside, UPCAST)
    gate = tl.zeros((ROWS, COLS), tl.float32)
    up = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(HELD, steps):
        at = first + step * STEP + k
        x = _activations(x_rows, at, is_row, K, inside, UPCAST)
        gate = tl.dot(x, _weights(weight_rows, at, K, inside, UPCAST), gate, input_precision="ieee")
        if GATED:
            other = _weights(weight_rows + N * K, at, K, inside, UPCAST)
            up = tl.dot(x, other, up, input_precision="ieee")
    if OVERLAP and LATE:
        gdc_launch_dependents()
    if HELD > 0:
        # Last, so that nothing waits for these loads before the loop's are on their way; what is
        # selected here comes from registers, where a dot alone would go through memory at once.
        held_x = tl.where(is_row[:, None], held_x, 0.0)
        gate = tl.dot(held_x, _of_outputs(held_gate, col, N), gate, input_precision="ieee")
        if GATED:
            up = tl.dot(held_x, _of_outputs(held_up, col, N), up, input_precision="ieee")
    is_out = is_row[:, None] & (col < N)[None, :]
    if SPLIT == 1:
        _finish(out_ptr, bias_ptr, gate, up, row, col, is_out, N, GATED, BIASED)
    else:
        place = partial_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
        size = num_rows * N
        tl.store(place + part * size, gate, mask=is_out)
        if GATED:
            tl.store(place + (SPLIT + part) * size, up, mask=is_out)
        tl.debug_barrier()  # the whole program has stored before it counts as arrived
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            gate = _sum_of_parts(place, size, is_out, SPLIT)
            if GATED:
                up = _sum_of_parts(place + SPLIT * size, size, is_out, SPLIT)
            _finish(out_ptr, bias_ptr, gate, up, row, col, is_out, N, GATED, BIASED)
            tl.store(arrived_ptr + tile, 0)


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, plan: Plan | None = None
) -> Tensor:
    """As `reference.few_rows`, for up to 64 rows.

    Args:
        x: [..., K]; rows may lie at any stride.
        weight: [N, K] contiguous, of x's dtype.
        plan: None takes `product_plan`'s.
    """
    return _launch(x, weight, bias, plan, gated=False)


def few_rows_gated(
    x: Tensor, gate_up: Tensor, bias: Tensor | None = None, plan: Plan | None = None
) -> Tensor:
    """As `reference.few_rows_gated`, for up to 64 rows."""
    return _launch(x, gate_up, bias, plan, gated=True)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan | None, *, gated: bool
) -> Tensor:
    rows = rows_of(x)
    num_rows, width = rows.shape
    num_cols = weight.shape[0] // 2 if gated else weight.shape[0]
    plan = plan or product_plan(num_rows, num_cols, width, gated=gated) or FALLBACK
    out = x.new_empty(*x.shape[:-1], num_cols)
    if not num_rows:
        return out
    tiles, partial, arrived = triton.cdiv(num_cols, plan.cols), out, out
    if plan.split > 1:
        slabs = plan.split * (2 if gated else 1)
        partial = x.new_empty((slabs, num_rows, num_cols), dtype=torch.float32)
        arrived = _arrivals(x.device)
    launch: Any = _few_rows[(tiles, plan.split)]
    launch(
        rows,
        weight,
        out if bias is None else bias,
        out,
        partial,
        arrived,
        num_rows,
        X_STRIDE=rows.stride(0),
        N=num_cols,
        K=width,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        COLS=plan.cols,
        STEP=plan.step,
        SPLIT=plan.split,
        AHEAD=plan.ahead,
        HELD=plan.held if plan.held * plan.step * plan.split <= width else 0,
        LATE=plan.late,
        GATED=gated,
        BIASED=bias is not None,
        UPCAST=interpreting() and x.dtype != torch.float32,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **(overlapped() if plan.overlap else {"OVERLAP": False}),
    )
    return out


@cache
def _arrivals(device: torch.device) -> Tensor:
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
