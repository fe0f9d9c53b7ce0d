"""Philox in Triton against its definition, bit for bit."""

import compiling
import pytest
import torch

from specdec.kernels.philox import reference
from specdec.kernels.philox.kernel import draws, philox

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def counters(n):
    rng = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (n,), generator=rng)
    words = [torch.randint(0, 2**32, (n,), generator=rng) for _ in range(4)]
    seeds[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    for word in words:
        word[:3] = torch.tensor([0, 2**32 - 1, 2**31])
    return [t.to(DEVICE) for t in (seeds, *words)]


@pytest.mark.parametrize("n", [4, 1023, 5000])
def test_words_and_uniforms_are_the_definition_bit_for_bit(n):
    inputs = counters(n)
    expected = torch.stack(reference.philox(*inputs))
    words, uniforms, exponentials = draws(*inputs)
    assert torch.equal(words, expected)
    assert torch.equal(uniforms, reference.to_uniform(expected))
    torch.testing.assert_close(
        exponentials, reference.to_exponential(expected), rtol=4e-7, atol=0.0
    )


def test_integers_broadcast_as_counters():
    seeds = torch.arange(3, device=DEVICE)[:, None]
    lanes = torch.arange(5, device=DEVICE)[None, :]
    got = philox(seeds, lanes, 7, 2, 1)
    for word, expected in zip(got, reference.philox(seeds, lanes, 7, 2, 1), strict=True):
        assert torch.equal(word, expected)


def test_compiles_for_sm_90():
    signature = {"seed_ptr": "*i64", "words_ptr": "*i64", "n": "i32"}
    signature |= {f"c{i}_ptr": "*i64" for i in range(4)}
    signature |= {"uniform_ptr": "*fp32", "exponential_ptr": "*fp32"}
    module = "specdec.kernels.philox.kernel"
    [built] = compiling.compile_sm90(
        [compiling.Compile(module, "_philox", signature, {"BLOCK": 1024})]
    )
    assert built.spilled == 0
