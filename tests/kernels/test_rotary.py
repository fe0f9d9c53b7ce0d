"""Tables of rotary positions: the kernel against torch, and torch against fp64."""

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.rotary import kernel, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(half, shape):
    generator = torch.Generator().manual_seed(half)
    positions = torch.randint(131072, shape, generator=generator)
    positions.view(-1)[0] = 0
    return (500000.0 ** -(torch.arange(half) / half)).to(DEVICE), positions.to(DEVICE)


@pytest.mark.parametrize("half", [1, 3, 64])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_kernel_equals_the_reference(half, shape, dtype, scale):
    args = (*operands(half, shape), dtype, scale)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    expected = reference.rotary_tables(*args)
    for ours, theirs in zip(kernel.rotary_tables(*args), expected, strict=True):
        assert ours.shape == (*shape, 1, 2 * half)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_tables_by_the_formula():
    inv_freq, positions = operands(16, (9,))
    cos, sin = reference.rotary_tables(inv_freq, positions, torch.float32, 1.5)
    angle = (positions.double()[:, None] * inv_freq.double())[:, None]
    tolerance = {"rtol": 0, "atol": 2e-2}  # of fp32 angles as far as 131072
    torch.testing.assert_close(cos[..., 16:].double(), 1.5 * angle.cos(), **tolerance)
    torch.testing.assert_close(sin[..., 16:].double(), 1.5 * angle.sin(), **tolerance)
    assert torch.equal(cos[..., :16], cos[..., 16:])
    assert torch.equal(sin[..., :16], -sin[..., 16:])


def test_compiles_for_sm90():
    tables = {"freq_ptr": "*fp32", "positions_ptr": "*i64", "num_rows": "i32", "scale": "fp32"}
    constants = {"HALF": 64, "ROWS": 4, "HALF_PAD": 64}
    compile_sm90(
        [
            Compile(
                "specdec.kernels.rotary.kernel",
                "_rotary",
                {**tables, "cos_ptr": f"*{dtype}", "sin_ptr": f"*{dtype}"},
                constants,
                num_warps=2,
            )
            for dtype in ("bf16", "fp32")
        ]
    )
