"""What the Triton kernels of the gated delta rule share: reading and keeping rows of inputs.

A request's text is its stored rows up to the last committed one, `edge` of them, and then this
step's rows. Row t of the text is stored row t before `edge` and batch row t - edge after it.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAPS = 4  # widest convolution; a narrower one has taps of weight 0 before its own


@triton.jit
def text_rows(stored, inputs, stride, first, line, channel, mask, edge, end, old, N: tl.constexpr):
    """Raw channels of text rows first + line in fp32, 0 outside [0, end) and where `mask` is False.

    stored, inputs: pointers to the request's first row in each; old: False where the stored rows
    are another text's. Offsets of 64 bits are the scalar ones: those of a tile fill registers.
    """
    t = first + line
    place = stored + first * N + (line * N + channel)
    kept = tl.load(place, mask=mask & old & (t >= 0) & (t < edge), other=0.0)
    place = inputs + (first - edge).to(tl.int64) * stride + (line * stride + channel)
    new = tl.load(place, mask=mask & (t >= edge) & (t < end), other=0.0)
    return kept.to(tl.float32) + new.to(tl.float32)


@triton.jit
def tap_weights(conv_ptr, channel, mask, tap: tl.constexpr, W: tl.constexpr):
    """The convolution's weights at one of four taps, in fp32."""
    real: tl.constexpr = tap >= 4 - W
    weight = tl.load(conv_ptr + channel * W + (tap - (4 - W)), mask=mask & real, other=0.0)
    return weight.to(tl.float32)


@triton.jit
def silu(x, like):
    """x * sigmoid(x), rounded as a tensor of `like`'s type would be, in fp32."""
    return (x / (1 + tl.exp(-x))).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def strength_of(x, like):
    return (1 / (1 + tl.exp(-x))).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def decay_of(step, bias, decay_log):
    """Log of what is left of the state: -exp(decay_log) * softplus(step + bias)."""
    x = step + bias
    grown = tl.exp(tl.minimum(x, 20.0))
    total = 1 + grown
    seen = total - 1  # exp(x) as it survived the addition; log1p by the usual correction
    soft = tl.where(seen == 0, grown, tl.log(total) * (grown / tl.where(seen == 0, 1.0, seen)))
    return -tl.exp(decay_log) * tl.where(x > 20.0, x, soft)


@triton.jit
def keep_rows_(
    stored,
    inputs,
    stride,
    first,
    channel,  # [C]
    mask,  # [C]
    edge,
    end,
    old,
    N: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_PAD: tl.constexpr,
):
    """Text rows first, first + 1, ... become the stored rows; past the text, its last row."""
    line = tl.arange(0, KEPT_PAD)[:, None]
    past = tl.minimum(line, end - 1 - first)
    is_row = (line < KEPT) & mask[None, :]
    tile = text_rows(
        stored, inputs, stride, first, past, channel[None, :], is_row, edge, end, old, N
    )
    tl.debug_barrier()  # all is read before anything is overwritten
    tl.store(stored + line * N + channel[None, :], tile.to(stored.dtype.element_ty), mask=is_row)


@triton.jit
def keep_shared_rows_(
    arrived_ptr,  # the key head's counter
    stored,
    inputs,
    stride,
    first,
    edge,
    end,
    old,
    key_head,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    REPEAT_PAD: tl.constexpr,
    SHARE: tl.constexpr,  # programs that read the key head's channels
    N: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_PAD: tl.constexpr,
):
    """Keeps a key head's channels and its value heads' gates: the last program to have read them
    does, and sets the counter back to 0."""
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SHARE - 1:
        repeat: tl.constexpr = HV // HK
        dim = tl.arange(0, DK_PAD)
        gate = tl.arange(0, REPEAT_PAD)
        gates = 2 * HK * DK + HV * DV + key_head * repeat + gate
        is_dim, is_gate = dim < DK, gate < repeat
        query = key_head * DK + dim
        keep_rows_(stored, inputs, stride, first, query, is_dim, edge, end, old, N, KEPT, KEPT_PAD)
        key = HK * DK + query
        keep_rows_(stored, inputs, stride, first, key, is_dim, edge, end, old, N, KEPT, KEPT_PAD)
        keep_rows_(stored, inputs, stride, first, gates, is_gate, edge, end, old, N, KEPT, KEPT_PAD)
        gates = HV + gates
        keep_rows_(stored, inputs, stride, first, gates, is_gate, edge, end, old, N, KEPT, KEPT_PAD)
        tl.store(arrived_ptr, 0)
