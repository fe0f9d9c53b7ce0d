"""The gated delta rule and its convolution: against formulas, chunked against row by row."""

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels.gated_delta.reference import (
    advance_state,
    causal_conv,
    gated_delta,
    gated_delta_chunked,
)

SHAPES = [  # requests, rows, key heads, value heads, Dk, Dv
    (1, 1, 1, 1, 1, 1),
    (2, 7, 2, 2, 8, 8),
    (3, 20, 1, 3, 5, 7),
    (1, 64, 2, 4, 16, 9),
    (2, 131, 2, 4, 4, 6),
]


def operands(shape, seed=0, dtype=torch.float32):
    n, t, hk, hv, dk, dv = shape
    g = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(n, t, hk, dk, generator=g) for _ in range(2))
    value = torch.randn(n, t, hv, dv, generator=g)
    decay = -torch.rand(n, t, hv, generator=g) * 3
    beta = torch.rand(n, t, hv, generator=g)
    state = torch.randn(n, hv, dk, dv, generator=g)
    return (query.to(dtype), key.to(dtype), value.to(dtype), decay, beta.to(dtype), state)


def by_matrices(query, key, value, decay, beta, state):
    """One request, one value head at a time, in float64: S <- e^a (1 - b k k^T) S + b k v^T."""
    n, t, hv, dv = value.shape
    repeat = hv // key.shape[2]
    out = torch.zeros(n, t, hv, dv, dtype=torch.float64)
    end = state.double().clone()
    for i in range(n):
        for h in range(hv):
            s = end[i, h]
            for row in range(t):
                k, q = (x[i, row, h // repeat].double() for x in (key, query))
                k, q = k / (k @ k + 1e-6).sqrt(), q / (q @ q + 1e-6).sqrt() / len(q) ** 0.5
                a, b = decay[i, row, h].double().exp(), beta[i, row, h].double()
                erase = torch.eye(len(k), dtype=torch.float64) - b * torch.outer(k, k)
                s = a * erase @ s + b * torch.outer(k, value[i, row, h].double())
                out[i, row, h] = s.T @ q
            end[i, h] = s
    return out, end


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk", [0, 1, 3, 64])
def test_rule_equals_its_matrices(shape, chunk):
    args = operands(shape)
    out, state = gated_delta_chunked(*args, chunk) if chunk else gated_delta(*args)
    expected, end = by_matrices(*args)
    assert out.dtype == state.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(state.double(), end, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("cut", [1, 6, 13])
def test_state_carries_on(cut):
    """Any split into two calls gives the same numbers, whichever form runs each part."""
    *args, state = operands(SHAPES[2])
    whole, end = gated_delta(*args, state)
    first, between = gated_delta_chunked(*(t[:, :cut] for t in args), state, 4)
    second, last = gated_delta(*(t[:, cut:] for t in args), between)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
    torch.testing.assert_close(last, end)
    torch.testing.assert_close(advance_state(*args[1:], state), end)


@pytest.mark.parametrize("rule", [gated_delta, gated_delta_chunked])
def test_masked_rows_leave_the_state(rule):
    """Rows with decay 0 and strength 0, wherever they stand, write and forget nothing."""
    *args, state = operands(SHAPES[1])
    keep = [0, 2, 3, 6]
    masked = torch.tensor([row not in keep for row in range(7)])
    gated = [*args[:3], *(t.masked_fill(masked[:, None], 0) for t in args[3:])]
    out, end = rule(*gated, state)
    expected, end_of_kept = rule(*(t[:, keep] for t in args), state)
    torch.testing.assert_close(out[:, keep], expected)
    torch.testing.assert_close(end, end_of_kept)


def test_extremes_stay_finite():
    """Strong decay over a long chunk, keys of length 0, strengths 0 and 1."""
    query, key, value, _, _, state = operands((1, 200, 2, 2, 8, 8))
    key[:, ::3] = 0
    decay = torch.full((1, 200, 2), -40.0)
    beta = (torch.arange(200) % 2).float()[None, :, None].expand(1, 200, 2)
    out, end = gated_delta_chunked(query, key, value, decay, beta, state)
    expected, last = gated_delta(query, key, value, decay, beta, state)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(end, last)


def test_chunked_gradients():
    args = [t.double().requires_grad_() for t in operands((1, 5, 1, 2, 3, 2))]
    wanted = torch.autograd.grad(sum(t.square().sum() for t in by_rows(*args)), args)
    args32 = [t.detach().float().requires_grad_() for t in args]
    out = gated_delta_chunked(*args32, 2)
    got = torch.autograd.grad(sum(t.square().sum() for t in out), args32)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-5)


def by_rows(query, key, value, decay, beta, state):
    """As `by_matrices`, batched and differentiable."""
    unit = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key)]
    query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], dim=2) for x in unit)
    outs = []
    for row in range(value.shape[1]):
        k, b = key[:, row, :, :, None], beta[:, row, :, None, None]
        state = decay[:, row, :, None, None].exp() * state
        state = state - b * k @ (k.mT @ state) + b * k @ value[:, row, :, None, :]
        outs.append((query[:, row, :, None, :] @ state).squeeze(-2) / query.shape[-1] ** 0.5)
    return torch.stack(outs, dim=1), state


@pytest.mark.parametrize("rule", [gated_delta, gated_delta_chunked])
def test_bfloat16(rule):
    args = operands(SHAPES[3], dtype=torch.bfloat16)
    out, state = rule(*args)
    exact, end = rule(*(t.float() for t in args))
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert ((out.float() - exact).norm() / exact.norm()) < 0.01
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_convolution(width, rows):
    g = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, width - 1 + rows, 6, generator=g)
    weight = torch.randn(6, width, generator=g)
    expected = F.silu(F.conv1d(inputs.mT, weight[:, None], groups=6)).mT
    torch.testing.assert_close(causal_conv(inputs, weight), expected)
