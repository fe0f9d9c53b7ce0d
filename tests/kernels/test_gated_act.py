"""The gated activation: kernel against its definition."""

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.gated_act import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps


def bound(gate, up, expected):
    """How far two evaluations of silu(gate) * up may lie apart.

    A GPU takes exp(-g) as 2 to the power of fl(-g * fl(log2 e)): the exponent is off by up to
    2 * |g| * eps / 2, and so is silu, relatively. The power (2^-22), the quotient (2 ulp), and the
    sum and product on both sides add at most 8 eps. Each rounding to a narrower dtype may fall to
    the next number. Where exp(-g) overflows on one side only, silu is below 89 * 2^-126.
    """
    relative = (gate.float().abs() + 8) * EPS
    if expected.dtype != torch.float32:
        relative = relative + 2 * torch.finfo(expected.dtype).eps
    return relative * expected.float().abs() + (up.float().abs() + 1) * 89 * 2.0**-126


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 64), (1, 2 * 1100), (2, 3, 74), (0, 8)])
def test_gated_act(shape, dtype):
    from specdec.kernels.gated_act import kernel

    torch.manual_seed(0)
    gate_up = (torch.randn(*shape) * 20).to(DEVICE, dtype)  # silu's both ends
    ours, expected = kernel.gated_act(gate_up), reference.gated_act(gate_up)
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    difference = (ours.float() - expected.float()).abs()
    assert (difference <= bound(*gate_up.chunk(2, dim=-1), expected)).all()


def test_rows_of_wider_rows():
    from specdec.kernels.gated_act import kernel

    rows = torch.randn(4, 100, device=DEVICE)[:, 10:40]
    torch.testing.assert_close(kernel.gated_act(rows), reference.gated_act(rows))


def test_compiles_for_sm90():
    constants = {"I": 14336, "BLOCK": 1024, "OVERLAP": True}
    items = [
        Compile(
            "specdec.kernels.gated_act.kernel",
            "_gated_act",
            {"gate_up_ptr": kind, "out_ptr": kind, "stride": "i32"},
            constants,
        )
        for kind in ("*bf16", "*fp32")
    ]
    for result in compile_sm90(items):
        assert result.spilled == 0
        assert result.ptx.index("griddepcontrol.wait") < result.ptx.index("ld.global")
