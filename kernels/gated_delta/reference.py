"""The gated delta rule (arXiv 2412.06464) and the convolution before it, in plain torch.

Each value head keeps a state S [Dk, Dv] in fp32. A row with key k, value v, decay a <= 0 (a log)
and strength b in [0, 1] does

    S <- exp(a) S;   S <- S + k (b (v - S^T k))^T;   out = S^T q

with q and k of unit length and q scaled by Dk ** -0.5. A row with a = 0 and b = 0 leaves S as it
is, which is how rows are masked. `gated_delta` is the definition; `gated_delta_chunked` is the same
function with one triangular system a chunk, for long inputs.
"""

from __future__ import annotations

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
