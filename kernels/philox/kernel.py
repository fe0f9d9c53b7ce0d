"""Philox 4x32-10 inside Triton kernels: the words of `reference.philox`, bit for bit.

`philox_words`, `to_uniform`, `to_exponential` and `key_uniform` are called from other kernels;
`philox` runs them over whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def philox_words(seed, c0, c1, c2, c3):
    """Four uint32 words for a 64-bit seed and integer counters of which the low 32 bits count.

    All arguments broadcast; the words have the shape of all of them together.
    """
    shape = (seed + c0 + c1 + c2 + c3) * 0  # int64 zeros
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0 = ((c0 + shape) & 0xFFFFFFFF).to(tl.uint32)
    w1 = ((c1 + shape) & 0xFFFFFFFF).to(tl.uint32)
    w2 = ((c2 + shape) & 0xFFFFFFFF).to(tl.uint32)
    w3 = ((c3 + shape) & 0xFFFFFFFF).to(tl.uint32)
    for step in tl.static_range(10):
        # one widening product gives both halves
        high = w0.to(tl.uint64) * 0xD2511F53
        low = w2.to(tl.uint64) * 0xCD9E8D57
        key0 = k0 + ((step * 0x9E3779B9) & 0xFFFFFFFF)
        key1 = k1 + ((step * 0xBB67AE85) & 0xFFFFFFFF)
        w0 = (low >> 32).to(tl.uint32) ^ w1 ^ key0.to(tl.uint32)
        w2 = (high >> 32).to(tl.uint32) ^ w3 ^ key1.to(tl.uint32)
        w1 = (low & 0xFFFFFFFF).to(tl.uint32)
        w3 = (high & 0xFFFFFFFF).to(tl.uint32)
    return w0, w1, w2, w3


@triton.jit
def to_uniform(words):
    """fp32 in [0, 1) from the upper 24 bits, exact."""
    return (words >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24


@triton.jit
def to_exponential(words):
    """Exp(1) draws -log1p(-u), u = (word + 0.5) / 2 ** 32, within two units in the last place.

    log(w) * u / (1 - w), w = 1 - u rounded, repairs what the rounding of w lost.
    """
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    w = 1.0 - u
    gap = 1.0 - w
    exact = gap == 0.0  # u so small that it is its own logarithm
    return tl.where(exact, u, -tl.log(w) * (u / tl.where(exact, 1.0, gap)))


@triton.jit
def key_uniform(seed, start, offset, purpose):
    """`keys.uniform` at node 0: one fp32 in [0, 1) of (seed, round start, offset, purpose)."""
    w0, _, _, _ = philox_words(seed, 0, start, offset, purpose)
    return to_uniform(w0)


@triton.jit
def _philox(
    seed_ptr,  # [n] int64
    c0_ptr,
    c1_ptr,
    c2_ptr,
    c3_ptr,
    words_ptr,  # [4, n] int64
    uniform_ptr,  # [4, n] fp32
    exponential_ptr,  # [4, n] fp32
    n,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    w0, w1, w2, w3 = philox_words(
        tl.load(seed_ptr + at, mask=inside, other=0),
        tl.load(c0_ptr + at, mask=inside, other=0),
        tl.load(c1_ptr + at, mask=inside, other=0),
        tl.load(c2_ptr + at, mask=inside, other=0),
        tl.load(c3_ptr + at, mask=inside, other=0),
    )
    for index in tl.static_range(4):
        word = w0 if index == 0 else (w1 if index == 1 else (w2 if index == 2 else w3))
        tl.store(words_ptr + index * n + at, word.to(tl.int64), mask=inside)
        tl.store(uniform_ptr + index * n + at, to_uniform(word), mask=inside)
        tl.store(exponential_ptr + index * n + at, to_exponential(word), mask=inside)


def draws(
    seed: Tensor, c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int
) -> tuple[Tensor, Tensor, Tensor]:
    """Words int64, uniforms fp32 and Exp(1) draws fp32, each [4, ...] of the broadcast shape."""
    counters = [torch.as_tensor(c, dtype=torch.int64, device=seed.device) for c in (c0, c1, c2, c3)]
    inputs = [t.contiguous() for t in torch.broadcast_tensors(seed, *counters)]
    shape, n = inputs[0].shape, inputs[0].numel()
    words = torch.empty((4, *shape), dtype=torch.int64, device=seed.device)
    uniforms, exponentials = (torch.empty_like(words, dtype=torch.float32) for _ in range(2))
    launch: Any = _philox[(triton.cdiv(n, 1024),)]
    launch(*inputs, words, uniforms, exponentials, n, BLOCK=1024)
    return words, uniforms, exponentials


def philox(
    seed: Tensor, c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four int64 word tensors for each key and counter, as `reference.philox` gives them."""
    first, second, third, fourth = draws(seed, c0, c1, c2, c3)[0].unbind(0)
    return first, second, third, fourth
