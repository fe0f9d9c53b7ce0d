"""Products with fp8 matrices: the kernel equals its reference, which equals the plain product."""

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.fp8_linear import kernel, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(rows, outputs, size, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=rng).to(DEVICE, dtype)
    weight = torch.randn(outputs, size, generator=rng).mul(50).to(DEVICE, torch.float8_e4m3fn)
    blocks = (-(-outputs // 128), -(-size // 128))
    scale = torch.rand(blocks, generator=rng).add(0.1).to(DEVICE)
    return x, weight, scale, torch.randn(outputs, generator=rng).to(DEVICE, dtype)


def test_each_block_has_its_scale():
    x, weight, scale, bias = case(2, 130, 260, torch.float32)
    expected = bias.double().repeat(2, 1)
    for o in range(130):
        for block in range(3):
            at = slice(128 * block, min(260, 128 * (block + 1)))
            part = x[:, at].double() @ weight[o, at].double()
            expected[:, o] += part * scale[o // 128, block].double()
    out = reference.fp8_linear(x, weight, scale, bias)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "outputs", "size"),
    [(1, 16, 128), (3, 37, 130), (4, 257, 256), (17, 130, 100), (70, 40, 384), (0, 16, 128)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_kernel_equals_the_reference(rows, outputs, size, dtype, biased):
    x, weight, scale, bias = case(rows, outputs, size, dtype)
    bias = bias if biased else None
    expected = reference.fp8_linear(x, weight, scale, bias)
    torch.use_deterministic_algorithms(True)  # fills what `empty` gives with NaN
    try:
        out = kernel.fp8_linear(x, weight, scale, bias)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.dtype == dtype
    assert out.shape == (rows, outputs)
    error = (out.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9)
    assert error < (1e-5 if dtype == torch.float32 else 5e-3)


def test_compiles():
    signature = {"x_ptr": "*bf16", "weight_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    signature |= {"bias_ptr": "*bf16", "out_ptr": "*bf16", "num_rows": "i32"}
    module, compiles = "specdec.kernels.fp8_linear.kernel", []
    for num_rows, outputs, size in ((4, 4096, 4096), (4, 28672, 1000), (64, 8192, 4096)):
        rows, cols, stages = kernel.tiles_for(num_rows, outputs)
        constants = {"N": outputs, "K": size, "ROWS": rows, "COLS": cols, "BLOCK": 128}
        constants |= {"BIASED": size == 1000, "UPCAST": False}
        compiles.append(Compile(module, "_fp8_linear", signature, constants, 4, stages))
    for built in compile_sm90(compiles):
        assert built.spilled == 0
        assert "cvt.rn.f16x2.e4m3x2" in built.ptx
