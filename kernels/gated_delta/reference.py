"""The gated delta rule (arXiv 2412.06464) and the convolution before it, in plain torch.

Each value head keeps a state S [Dk, Dv] in fp32. A row with key k, value v, decay a <= 0 (a log)
and strength b in [0, 1] does

    S <- exp(a) S;   S <- S + k (b (v - S^T k))^T;   out = S^T q

with q and k of unit length and q scaled by Dk ** -0.5. A row with a = 0 and b = 0 leaves S as it
is, which is how rows are masked. `gated_delta` is the definition; `gated_delta_chunked` is the same
function with one triangular system a chunk, for long inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # rows of one triangular system
UNIT_EPS = 1e-6  # added to the squared length


def causal_conv(inputs: Tensor, weight: Tensor) -> Tensor:
    """silu of a causal convolution of each channel: [N, W - 1 + T, C] and [C, W] give [N, T, C].

    The first W - 1 rows are what came before (zeros at a text's start). Summed in fp32, returned in
    the inputs' dtype.
    """
    width = weight.shape[1]
    rows = inputs.shape[1] - width + 1
    taps = weight.float()
    total = inputs[:, :rows].float() * taps[:, 0]
    for tap in range(1, width):
        total = total + inputs[:, tap : tap + rows].float() * taps[:, tap]
    return F.silu(total).to(inputs.dtype)


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Row by row: the definition.

    Args:
        query, key: [N, T, Hk, Dk], of any length. Value head h reads key head h * Hk // Hv.
        value: [N, T, Hv, Dv].
        decay: [N, T, Hv] log of what is left of the state, at most 0.
        beta: [N, T, Hv].
        state: [N, Hv, Dk, Dv] fp32, before the first row.

    Returns:
        [N, T, Hv, Dv] in the value's dtype, and the state after the last row.
    """
    query, key = _query(query, value.shape[2]), _unit(key, value.shape[2])
    outputs = []
    for row in range(value.shape[1]):
        state = _advance(state, key[:, row], value[:, row], decay[:, row], beta[:, row])
        outputs.append((state * query[:, row].unsqueeze(-1)).sum(dim=-2))
    out = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(value)
    return out.to(value.dtype), state


def advance_state(key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The state that `gated_delta` returns, without its outputs."""
    key = _unit(key, value.shape[2])
    for row in range(value.shape[1]):
        state = _advance(state, key[:, row], value[:, row], decay[:, row], beta[:, row])
    return state


def gated_delta_chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """`gated_delta` in chunks of rows.

    With G_i the sum of decays up to row i of a chunk and S its entering state, the written deltas D
    solve (1 + A) D = b (V - exp(G) K S), where A is b_i exp(G_i - G_j) k_i.k_j below the diagonal.
    """
    heads = value.shape[2]
    rows = [t.transpose(1, 2) for t in (_query(query, heads), _unit(key, heads), value.float())]
    gates = [t.float().transpose(1, 2) for t in (decay, beta)]
    outputs = []
    for q, k, v, a, b in zip(*(t.split(chunk, dim=2) for t in (*rows, *gates)), strict=True):
        total = a.cumsum(dim=-1)  # [N, Hv, L]
        between = total.unsqueeze(-1) - total.unsqueeze(-2)
        later = torch.ones_like(between[0, 0], dtype=torch.bool).triu(1)
        between = between.masked_fill(later, float("-inf")).exp()
        since = total.exp().unsqueeze(-1)
        system = b.unsqueeze(-1) * (k @ k.transpose(-1, -2)) * between
        seen = b.unsqueeze(-1) * (v - since * (k @ state))
        # only the part of `system` below the diagonal is read; the diagonal counts as ones
        delta = torch.linalg.solve_triangular(system, seen, upper=False, unitriangular=True)
        outputs.append(since * (q @ state) + ((q @ k.transpose(-1, -2)) * between) @ delta)
        left = (total[..., -1:] - total).exp().unsqueeze(-1)
        state = total[..., -1].exp()[..., None, None] * state + (k * left).transpose(-1, -2) @ delta
    out = torch.cat(outputs, dim=2).transpose(1, 2) if outputs else torch.zeros_like(value)
    return out.to(value.dtype), state


def _advance(state: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    state = decay.float().exp()[..., None, None] * state
    missing = value.float() - (state * key.unsqueeze(-1)).sum(dim=-2)
    return state + key.unsqueeze(-1) * (beta.float().unsqueeze(-1) * missing).unsqueeze(-2)


def _unit(x: Tensor, num_heads: int) -> Tensor:
    """Rows of unit length in fp32, each head repeated for the value heads that read it."""
    x = x.float()
    x = x * (x.square().sum(dim=-1, keepdim=True) + UNIT_EPS).rsqrt()
    return x.repeat_interleave(num_heads // x.shape[2], dim=2)


def _query(x: Tensor, num_heads: int) -> Tensor:
    return _unit(x, num_heads) * x.shape[-1] ** -0.5


class WindowPlan(NamedTuple):
    """What the step's requests do with their slots; shared by all layers of a pass."""

    rows: Tensor  # [R, 4] int32: real rows, stored rows to fold, rows before the kept state, fresh
    arrived: Tensor  # [R, Hk] int32, zeros between launches: a kernel's counters


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
    """Reads a step's rows for `delta_step_`, and records where each slot's stored rows now start.

    Args:
        window_start: [S] position of the first stored row of each slot.
        positions, row_valid: [T]; a request's real rows come first.
        query_start: [R + 1].
        request_slots: [R]; requests without a real row leave their slot alone and may share it.
        window: rows of a step that a verifier may reject, and one; a request with more real rows is
            a prefill chunk, all of whose rows are committed.
        num_key_heads: of the layers' `delta_step_`.
    """
    lens = query_start.diff()
    sums = F.pad(row_valid.long().cumsum(0), (1, 0))
    num_valid = sums[query_start[1:]] - sums[query_start[:-1]]
    first = positions[query_start[:-1].clamp(max=len(positions) - 1)]
    old = window_start[request_slots]
    active = num_valid > 0
    fresh = active & (first == 0)
    count = torch.where(fresh, 0, (first - old).clamp(0, window - 1))
    num_final = torch.where(num_valid > window, num_valid, 1)
    window_start[request_slots[active]] = (first + num_final)[active]
    rows = torch.stack((num_valid, count, num_final, fresh.long()), dim=1).int()
    return WindowPlan(rows, rows.new_zeros(len(lens), num_key_heads))


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
    """One layer's recurrence over a ragged step, request by request.

    Args:
        inputs: [T, n] query, key and value channels (C), then strength and step of each head.
        conv: [C, W].
        decay_log, step_bias: [Hv].
        states: [S, Hv, Dk, Dv] fp32, updated.
        stored: [S, W - 1 + window - 1, n] what the convolution sees before the rows that may be
            rejected, and those rows; updated. Rows past the request's last one mean nothing.
        plan: of `plan_windows_`.
        query_start: [R + 1].
        request_slots: [R].
        max_query_len: of the step's requests, known on the host.

    Returns:
        [T, Hv, Dv] in the inputs' dtype, 0 on padding rows.
    """
    (channels, width), heads, value_dim = conv.shape, states.shape[1], states.shape[3]
    sizes = [num_key_heads * key_dim] * 2 + [heads * value_dim]
    out = inputs.new_zeros(len(inputs), heads, value_dim)
    starts, slots = query_start.tolist(), request_slots.tolist()
    for request, (num_valid, count, num_final, fresh) in enumerate(plan.rows.tolist()):
        if num_valid == 0:
            continue
        first, slot = starts[request], slots[request]
        state, old = states[slot].clone(), stored[slot].clone()
        if fresh:
            state, old = state.zero_(), old.zero_()
        text = torch.cat((old[: width - 1 + count], inputs[first : first + num_valid]))
        mixed = causal_conv(text[None, :, :channels], conv).split(sizes, dim=-1)
        query, key, value = (
            t.unflatten(-1, (-1, dim))
            for t, dim in zip(mixed, (key_dim, key_dim, value_dim), strict=True)
        )
        strength, step = text[None, width - 1 :, channels:].split(heads, dim=-1)
        softened = F.softplus(step.float() + step_bias.float())
        decay, beta = -decay_log.float().exp() * softened, strength.sigmoid()
        rows = (query, key, value, decay, beta)
        kept = count + num_final
        head, states[slot] = (t[0] for t in gated_delta(*(t[:, :kept] for t in rows), state[None]))
        tail = gated_delta(*(t[:, kept:] for t in rows), states[slot][None])[0][0]
        out[first : first + num_valid] = torch.cat((head, tail))[count:]
        wanted = torch.arange(kept, kept + len(old), device=text.device)
        stored[slot] = text[wanted.clamp(max=len(text) - 1)]
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate) over the last dimension, in fp32, in x's dtype."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * F.silu(gate.float())).to(x.dtype)
