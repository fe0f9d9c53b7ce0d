"""The gated activation: kernel against its definition."""

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.gated_act import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 64), (1, 2 * 1100), (2, 3, 74), (0, 8)])
def test_gated_act(shape, dtype):
    from specdec.kernels.gated_act import kernel

    torch.manual_seed(0)
    gate_up = (torch.randn(*shape) * 20).to(DEVICE, dtype)  # silu's both ends
    ours, expected = kernel.gated_act(gate_up), reference.gated_act(gate_up)
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    difference, scale = (ours.float() - expected.float()).abs(), expected.float().abs()
    assert (difference <= TOLERANCE[dtype] * 2 * scale + 1e-30).all()


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
