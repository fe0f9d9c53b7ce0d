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
    """int32 that order as the floats do (-0 below 0); an involution on the bits."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True)
        key = (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key


@triton.jit
def value_of(key, dtype: tl.constexpr):
    """fp32 of the logit of type `dtype` behind a key."""
    if dtype.primitive_bitwidth == 16:
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
def row_sums(logits_ptr, vocab_size, key, least, top, scale, TILE: tl.constexpr):
    """How many of the row's keys reach `key`, their weight, and the weight of scaled >= least."""
    count = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.float32)
    kept = tl.zeros((TILE,), tl.float32)
    for first in range(0, vocab_size, TILE):
        id = first + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + id, mask=id < vocab_size, other=float("-inf"))
        scaled = (logits.to(tl.float32) - top) * scale
        weight = tl.where(scaled >= least, tl.exp(scaled), 0.0)
        reach = key_of(logits) >= key
        count += (reach & (id < vocab_size)).to(tl.int32)
        mass += tl.where(reach, weight, 0.0)
        kept += weight
    return tl.sum(count), tl.sum(mass), tl.sum(kept)
