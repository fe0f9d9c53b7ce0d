"""Norms of a growing residual stream: kernels against their definition."""

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.add_norm import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MODULE = "specdec.kernels.add_norm.kernel"


def random(*shape, dtype):
    return (torch.randn(*shape) * 3).to(DEVICE, dtype)


def close(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    assert error < TOLERANCE[ours.dtype]


def same_sum(ours, theirs):
    """Bit for bit, except that the interpreter cuts bfloat16 off where a GPU rounds."""
    if ours.dtype == torch.float32 or ours.is_cuda:
        assert torch.equal(ours, theirs)
    else:
        close(ours, theirs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("shape", [(3, 64), (5, 77), (1, 1000), (2, 3, 40), (0, 8)])
def test_add_norm(shape, zero_centred, dtype):
    from specdec.kernels.add_norm import kernel

    torch.manual_seed(0)
    hidden, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    weight = random(shape[-1], dtype=dtype)
    for grown in (residual, None):
        arguments = (hidden, grown, weight, 1e-5, zero_centred)
        normed, summed = kernel.add_norm(*arguments)
        expected, sums = reference.add_norm(*arguments)
        if hidden.numel():
            same_sum(summed, sums)
            close(normed, expected)
        else:
            assert (normed.shape, summed.shape) == (hidden.shape, hidden.shape)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_of_wider_rows(dtype):
    from specdec.kernels.add_norm import kernel

    torch.manual_seed(0)
    wide = random(5, 7, 24, dtype=dtype)
    weight = random(24, dtype=dtype)
    heads = wide[:, 2:6]
    close(kernel.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))
    rows = random(5, 96, dtype=dtype)
    arguments = (wide[:, 1], rows[:, 30:54], weight, 1e-6)
    normed, summed = kernel.add_norm(*arguments)
    expected, sums = reference.add_norm(*arguments)
    same_sum(summed, sums)
    close(normed, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("zero_centred", [False, True])
def test_norm_pair(dtype, zero_centred):
    from specdec.kernels.add_norm import kernel

    torch.manual_seed(0)
    first, second = random(4, 50, dtype=dtype), random(4, 80, dtype=dtype)[:, 7:57]
    weights = random(2, 50, dtype=dtype)
    arguments = (first, second, weights[0], weights[1], 1e-5, zero_centred)
    close(kernel.norm_pair(*arguments), reference.norm_pair(*arguments))
    again = reference.norm_pair(first * 0, *arguments[1:])
    zeroed = kernel.norm_pair(first * 0, *arguments[1:])
    assert torch.equal(zeroed[:, :50], torch.zeros_like(first))
    close(zeroed, again)


def test_a_zero_row_stays_zero():
    from specdec.kernels.add_norm import kernel

    zeros, weight = torch.zeros(2, 33, device=DEVICE), torch.ones(33, device=DEVICE)
    normed, _ = kernel.add_norm(zeros, zeros, weight, 1e-6)
    assert torch.equal(normed, zeros)


def test_compiles_for_sm90():
    strides = ("hidden_stride", "inner_stride", "residual_stride")
    items = []
    for kind in ("*bf16", "*fp32"):
        pointers = ("hidden_ptr", "residual_ptr", "weight_ptr", "normed_ptr", "summed_ptr")
        signature = dict.fromkeys(pointers, kind) | dict.fromkeys(strides, "i32") | {"eps": "fp32"}
        constants = {
            "H": 4096, "INNER": 1, "BLOCK": 4096, "ADDS": True, "ZERO_CENTRED": False,
            "OVERLAP": True,
        }  # fmt: skip
        items.append(Compile(MODULE, "_add_norm", signature, constants, 16))
        pointers = ("first_ptr", "second_ptr", "first_weight_ptr", "second_weight_ptr", "out_ptr")
        signature = dict.fromkeys(pointers, kind) | {"eps": "fp32"}
        signature |= {"first_stride": "i32", "second_stride": "i32"}
        constants = {"H": 4096, "BLOCK": 4096, "ZERO_CENTRED": True, "OVERLAP": True}
        items.append(Compile(MODULE, "_norm_pair", signature, constants, 16))
    for result in compile_sm90(items):
        assert result.spilled == 0
        assert result.ptx.index("launch_dependents") < result.ptx.index("griddepcontrol.wait")
        assert result.ptx.index("griddepcontrol.wait") < result.ptx.index("st.global")
