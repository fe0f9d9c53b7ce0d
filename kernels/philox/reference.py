"""Philox 4x32-10, the counter-based generator behind every random number (Salmon et al., SC 2011).

Words are held in int64 tensors with values in [0, 2^32); products wrap in two's complement, so that
the high word is an arithmetic shift away and results equal Triton's `tl.randint4x` bit for bit.
"""

from typing import cast

from torch import Tensor, log1p

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    seed: Tensor, c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for each key and counter.

    Args:
        seed: int64, any shape broadcastable with the counters; its 64 bits are the key.
        c0, c1, c2, c3: int64 counter words in [0, 2^32), broadcastable; integers are taken too.

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        low = c2 * _MULTIPLIERS[1]
        high = c0 * _MULTIPLIERS[0]
        c0, c1, c2, c3 = (
            ((low >> 32) & _MASK) ^ c1 ^ k0,
            low & _MASK,
            ((high >> 32) & _MASK) ^ c3 ^ k1,
            high & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return cast("tuple[Tensor, Tensor, Tensor, Tensor]", (c0, c1, c2, c3))  # the seed is in each


def to_uniform(words: Tensor) -> Tensor:
    """fp32 uniforms in [0, 1) from the upper 24 bits: exact, never 1, so `u < 1` always holds."""
    return (words >> 8).float() * 2.0**-24


def to_exponential(words: Tensor) -> Tensor:
    """fp32 Exp(1) draws as `-log1p(-u)`, u = (word + 0.5) / 2^32.

    Small draws, the ones that win a race, keep full relative precision; u may round to 1 in fp32,
    which gives +inf: a draw that loses every race.
    """
    return -log1p(-(words.float() + 0.5) * 2.0**-32)
