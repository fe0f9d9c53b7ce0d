"""Floats as integers of the same order, and thresholds found by halving over them."""

import torch
import triton
import triton.language as tl

EXCLUDED = {  # key_of(-inf)
    torch.float32: -(2**31) + 0x7FFFFF,
    torch.bfloat16: -(2**15) + 0x7F,
    torch.float16: -(2**15) + 0x3FF,
}


@triton.jit
def key_of(x):
    """int32 that order as the floats do, both zeros as 0; an involution on all other bits."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True)
        key = (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(key == -1, 0, key)  # -1 is what -0 gives


@triton.jit
def value_of(key, dtype: tl.constexpr):
    """fp32 of the logit of type `dtype` behind a key."""
    if dtype.primitive_bitwidth == 16:  # ty: ignore[missing-attribute]
        small = key.to(tl.int16)
        value = (small ^ ((small >> 15) & 0x7FFF)).to(dtype, bitcast=True).to(tl.float32)
    else:
        value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def middle_of(low, high):
    return (low & high) + ((low ^ high) >> 1)  # no sum that overflows


@triton.jit
def kth_key(keys, low, high, k):
    """The largest key in [low, high] that at least k of the keys reach; low if none is."""
    while low < high:
        middle = middle_of(low, high) + 1
        enough = tl.sum((keys >= middle).to(tl.int32)) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def mass_key(keys, weights, low, high, wanted):
    """The largest key in [low, high] such that the weights of keys at or above it reach wanted."""
    while low < high:
        middle = middle_of(low, high) + 1
        enough = tl.sum(tl.where(keys >= middle, weights, 0.0)) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def row_count(logits_ptr, vocab_size, least, TILE: tl.constexpr):
    """How many of the row's logits are at least `least`, a finite value."""
    count = tl.zeros((TILE,), tl.int32)
    for first in tl.range(0, vocab_size, TILE, num_stages=3):
        id = first + tl.arange(0, TILE)
        x = tl.load(logits_ptr + id, mask=id < vocab_size, other=float("-inf")).to(tl.float32)
        count += (x >= least).to(tl.int32)
    return tl.sum(count)


@triton.jit
def row_mass(logits_ptr, vocab_size, least, top, scale, TILE: tl.constexpr):
    """The weight of the row's logits whose scaled value is at least `least`."""
    mass = tl.zeros((TILE,), tl.float32)
    for first in tl.range(0, vocab_size, TILE, num_stages=3):
        id = first + tl.arange(0, TILE)
        x = tl.load(logits_ptr + id, mask=id < vocab_size, other=float("-inf")).to(tl.float32)
        scaled = (x - top) * scale
        mass += tl.where(scaled >= least, tl.exp(scaled), 0.0)
    return tl.sum(mass)


@triton.jit
def row_kth_key(logits_ptr, vocab_size, low, high, k, dtype: tl.constexpr, TILE: tl.constexpr):
    """`kth_key` over the whole row."""
    while low < high:
        middle = middle_of(low, high) + 1
        enough = row_count(logits_ptr, vocab_size, value_of(middle, dtype), TILE) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def row_mass_key(
    logits_ptr, vocab_size, low, high, wanted, least, top, scale, dtype: tl.constexpr,
    STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`mass_key` over the row's logits whose scaled value is at least `least`.

    The first `STEPS` steps halve the values, since most of the keys between two values of unlike
    sign or size stand for tiny ones; those after them halve the keys, which ends for any values.
    """
    step = 0
    while low < high:
        middle = middle_of(low, high) + 1
        if step < STEPS:
            between = value_of(low, dtype) * 0.5 + value_of(high, dtype) * 0.5
            middle = tl.maximum(tl.minimum(key_of(between.to(dtype)), high), low + 1)
        floor = tl.maximum((value_of(middle, dtype) - top) * scale, least)
        enough = row_mass(logits_ptr, vocab_size, floor, top, scale, TILE) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        step += 1
    return low
