"""Rotation with the cache write: the kernel against torch, and torch against the formula."""

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.cache_write import kernel, reference
from specdec.kernels.cache_write.reference import HeadNorms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(4, 2, 16), (3, 1, 6), (9, 3, 64), (2, 2, 128)]  # Hq, Hkv, D


def operands(num_rows, shape, dtype, norms=False):
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(num_rows)

    def random(*size):
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    angle = torch.rand(num_rows, 1, dim // 2, generator=generator) * 7
    cos, sin = (
        torch.cat(pair, -1).to(DEVICE, dtype)
        for pair in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin()))
    )
    slots = torch.randperm(3 * num_rows, generator=generator)[:num_rows].to(DEVICE)
    weights = HeadNorms(1 + random(dim), random(dim), 1e-6) if norms else None
    return random(num_rows, heads + 2 * kv_heads, dim), cos, sin, slots, weights


def caches(num_rows, shape, dtype):
    pages = (num_rows, 3, shape[1], shape[2])
    return [torch.full(pages, -7.0, dtype=dtype, device=DEVICE) for _ in range(2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_the_reference(shape, num_rows, norms, dtype):
    """Also bit for bit what is copied, and what is not written to stays."""
    args = operands(num_rows, shape, dtype, norms)
    keys, values = caches(num_rows, shape, dtype)
    expected_keys, expected_values = caches(num_rows, shape, dtype)
    out = kernel.cache_write_(keys, values, *args)
    expected = reference.cache_write_(expected_keys, expected_values, *args)
    assert torch.equal(values, expected_values)
    assert torch.equal(keys == -7, expected_keys == -7)
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(keys, expected_keys, **tolerance)
    torch.testing.assert_close(out, expected, **tolerance)
    if dtype == torch.bfloat16:  # the same roundings, but for sums that fall between two values
        assert (out != expected).float().mean() < 0.01


def test_rotation_by_the_formula():
    """Pairs (i, i + D / 2) turn by their angle as complex numbers."""
    qkv, cos, sin, slots, _ = operands(5, (4, 2, 16), torch.float32)
    keys, values = caches(5, (4, 2, 16), torch.float32)
    query = reference.cache_write_(keys, values, qkv, cos, sin, slots)
    turn = torch.complex(cos[..., 8:], sin[..., 8:])
    turned = torch.complex(qkv[..., :8], qkv[..., 8:]) * turn
    turned = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(query, turned[:, :4])
    torch.testing.assert_close(keys.flatten(0, 1)[slots], turned[:, 4:6])
    assert torch.equal(values.flatten(0, 1)[slots], qkv[:, 6:])


def test_compiles_for_sm90():
    pointers = ("key_cache", "value_cache", "qkv", "query", "cos", "sin")
    norms = ("query_norm_ptr", "key_norm_ptr")
    compiles = []
    for dtype in ("bf16", "fp32"):
        signature = {f"{name}_ptr": f"*{dtype}" for name in pointers}
        signature |= {"slots_ptr": "*i64", "eps": "fp32"}
        shape = {
            "HQ": 32,
            "HKV": 8,
            "D": 128,
            "HEADS": 8,
            "D_PAD": 128,
            "EXACT": False,
            "OVERLAP": True,
        }
        without = {**shape, **dict.fromkeys(norms)}
        normed = {**signature, **dict.fromkeys(norms, f"*{dtype}")}
        compiles += [
            Compile("specdec.kernels.cache_write.kernel", "_cache_write", signature, without),
            Compile("specdec.kernels.cache_write.kernel", "_cache_write", normed, shape),
        ]
    assert all(result.spilled == 0 for result in compile_sm90(compiles))
