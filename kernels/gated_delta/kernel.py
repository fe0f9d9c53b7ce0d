"""A DeltaNet layer's recurrence over a step in Triton: see `reference.delta_step_`.

One launch where no request has more rows than a verifier may reject, three where some do. The
window kernel makes the rule's operands from the raw rows itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gated_delta.norm import gated_norm_kernel
from specdec.kernels.gated_delta.prefill import convolve_kernel, delta_prefill_kernel
from specdec.kernels.gated_delta.reference import WindowPlan
from specdec.kernels.gated_delta.rows import TAPS
from specdec.kernels.gated_delta.window import delta_window_kernel, plan_windows_kernel
from specdec.kernels.runtime import interpreting

FULL_GPU = 2048  # one-warp programs, two waves of them; wider ones convolve their keys fewer times
CHUNK = 32  # most rows of a prefill chunk: the products that Triton makes of 64 read out of bounds


def plan_windows_(
    window_start: Tensor,
    *,
    positions: Tensor,
    query_start: Tensor,
    row_valid: Tensor,
    request_slots: Tensor,
    window: int,
    num_key_heads: int,
) -> WindowPlan:
    """See `reference.plan_windows_`."""
    num_requests = len(request_slots)
    rows = positions.new_empty((num_requests, 4), dtype=torch.int32)
    arrived = positions.new_empty((num_requests, num_key_heads), dtype=torch.int32)
    launch: Any = plan_windows_kernel[(num_requests,)]
    launch(
        positions,
        query_start,
        row_valid,
        request_slots,
        window_start,
        rows,
        arrived,
        WINDOW=window,
        HK=num_key_heads,
        HK_PAD=triton.next_power_of_2(num_key_heads),
        ROWS=64,
        num_warps=1,
    )
    return WindowPlan(rows, arrived)


def delta_step_(
    inputs: Tensor,
    conv: Tensor,
    decay_log: Tensor,
    step_bias: Tensor,
    states: Tensor,
    stored: Tensor,
    plan: WindowPlan,
    *,
    query_start: Tensor,
    request_slots: Tensor,
    num_key_heads: int,
    key_dim: int,
    max_query_len: int,
) -> Tensor:
    """See `reference.delta_step_`; inputs may have any row stride.

    Raises:
        ValueError: the convolution is wider than the kernel's.
    """
    width = conv.shape[1]
    if width > TAPS:
        raise ValueError(f"a convolution of width {width} has no kernel, at most {TAPS}; use torch")
    num_requests, num_heads, value_dim = len(request_slots), states.shape[1], states.shape[3]
    window = stored.shape[1] - (width - 1) + 1
    out = inputs.new_empty(len(inputs), num_heads, value_dim)
    block, warps = window_config(num_requests * num_heads, value_dim)
    tensors = (inputs, conv, decay_log, step_bias, states, stored, out, *plan)
    shared = {
        "HK": num_key_heads,
        "HV": num_heads,
        "DK": key_dim,
        "DV": value_dim,
        "W": width,
        "WINDOW": window,
        "DK_PAD": max(16, triton.next_power_of_2(key_dim)),
        "REPEAT_PAD": triton.next_power_of_2(num_heads // num_key_heads),
        "KEPT_PAD": triton.next_power_of_2(max(1, stored.shape[1])),
    }
    launch: Any = delta_window_kernel[(num_heads * triton.cdiv(value_dim, block), num_requests)]
    launch(
        *tensors,
        query_start,
        request_slots,
        inputs.stride(0),
        BLOCK=block,
        num_warps=warps,
        **shared,
    )
    if max_query_len > window:
        _prefill_(tensors, query_start, request_slots, max_query_len, shared)
    return out


def _prefill_(
    tensors: tuple[Tensor, ...],
    query_start: Tensor,
    request_slots: Tensor,
    max_query_len: int,
    shared: dict[str, int],
) -> None:
    """The rows of prefill chunks; `tensors` and `shared` are the window kernel's."""
    inputs, conv, decay_log, step_bias, states, stored, out, rows, arrived = tensors
    num_requests, (channels, width), window = len(request_slots), conv.shape, shared["WINDOW"]
    mixed = inputs.new_empty(len(inputs) + num_requests * (window - 1), channels)
    convolve: Any = convolve_kernel[(triton.cdiv(len(mixed), 32), triton.cdiv(channels, 128))]
    convolve(
        inputs,
        conv,
        stored,
        mixed,
        rows,
        query_start,
        request_slots,
        inputs.stride(0),
        num_requests,
        len(mixed),
        C=channels,
        N=inputs.shape[1],
        W=width,
        WINDOW=window,
        REQUESTS=triton.next_power_of_2(num_requests),
        ROWS=32,
        CHANNELS=min(128, triton.next_power_of_2(channels)),
    )
    num_heads, value_dim = states.shape[1], states.shape[3]
    low = inputs.dtype == torch.bfloat16
    # fp32 products are written out in full: at 64 a key of 256 numbers compiles for half a minute
    block = min(64 if low else 32, max(16, triton.next_power_of_2(value_dim)))
    launch: Any = delta_prefill_kernel[(num_heads * triton.cdiv(value_dim, block), num_requests)]
    launch(
        inputs,
        mixed,
        decay_log,
        step_bias,
        states,
        stored,
        out,
        rows,
        arrived,
        query_start,
        request_slots,
        inputs.stride(0),
        BLOCK=block,
        ROWS=max(16, min(CHUNK, triton.next_power_of_2(max_query_len))),
        OPERAND=tl.bfloat16 if low and not interpreting() else tl.float32,
        PRECISION="ieee",
        SOLVE_PRECISION="tf32x3" if low else "ieee",
        LOOSE_PRECISION="tf32" if low else "ieee",
        num_warps=4,
        num_stages=1,
        **shared,
    )


def window_config(num_states: int, value_dim: int) -> tuple[int, int]:
    """Value dimensions of a program of the window kernel, and its warps."""
    return (8, 1) if num_states * triton.cdiv(value_dim, 8) <= FULL_GPU else (32, 4)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.gated_norm`; gate may have any row stride.

    Args:
        x: [T, H, D].
        gate: [T, H, D] with contiguous heads.
    """
    num_rows, num_heads, dim = x.shape
    out = torch.empty_like(x)
    heads = max(1, 512 // triton.next_power_of_2(dim))
    launch: Any = gated_norm_kernel[(num_rows, triton.cdiv(num_heads, heads))]
    launch(
        x,
        gate,
        weight,
        out,
        gate.stride(0),
        eps,
        HEADS=num_heads,
        D=dim,
        HEADS_PAD=heads,
        D_PAD=triton.next_power_of_2(dim),
        num_warps=4,
    )
    return out
