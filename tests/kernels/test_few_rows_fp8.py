"""Products of few rows with fp8 matrices: the kernel, and the definition beside it."""

import pytest
import torch
from compiling import compile_sm90
from test_few_rows import close, normed
from test_few_rows_plans import compiled

from specdec.kernels.few_rows import kernel, reference
from specdec.kernels.few_rows.plan import FP8_ROWS, Plan, fp8_plan, plan_for
from specdec.kernels.few_rows.reference import Fp8Weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Plan(cols=16, step=32, split=1, warps=2, stages=3)
DTYPES = [torch.float32, torch.bfloat16]


def case(num_rows, num_cols, width, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=rng).to(DEVICE, dtype)
    data = torch.randn(num_cols, width, generator=rng).mul(50).to(DEVICE, torch.float8_e4m3fn)
    blocks = (-(-num_cols // 128), -(-width // 128))
    scale = torch.rand(blocks, generator=rng).add(0.1).div(100).to(DEVICE)
    return x, Fp8Weight(data, scale), torch.randn(num_cols, generator=rng).to(DEVICE, dtype)


def test_each_block_has_its_scale():
    x, weight, bias = case(2, 130, 260, torch.float32)
    expected = bias.double().repeat(2, 1)
    for o in range(130):
        for block in range(3):
            at = slice(128 * block, min(260, 128 * (block + 1)))
            part = x[:, at].double() @ weight.data[o, at].double()
            expected[:, o] += part * weight.scale[o // 128, block].double()
    out = reference.few_rows(x, weight, bias)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_every_value_is_exact(dtype):
    data = torch.arange(256, device=DEVICE).to(torch.uint8).view(torch.float8_e4m3fn)
    data = torch.where(data.float().isnan(), 0.0, data.float()).to(torch.float8_e4m3fn)
    weight = Fp8Weight(data.view(32, 8).repeat(1, 16), torch.ones(1, 1, device=DEVICE))
    rows = torch.eye(128, device=DEVICE, dtype=dtype)[:8]
    out = kernel.few_rows(rows, weight)
    assert torch.equal(out.T.float(), data.view(32, 8).float())


@pytest.mark.parametrize(
    ("num_rows", "num_cols", "width"),
    [(1, 16, 128), (3, 37, 130), (4, 257, 256), (17, 130, 100), (64, 40, 384), (0, 16, 128)],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "plan", [None, SMALL, SMALL._replace(split=3, swap_ab=True), SMALL._replace(cols=24)]
)
def test_product(num_rows, num_cols, width, dtype, plan):
    x, weight, bias = case(num_rows, num_cols, width, dtype)
    for own in (bias, None):
        torch.use_deterministic_algorithms(True)  # fills what `empty` gives with NaN
        try:
            out = kernel.few_rows(x, weight, own, plan)
        finally:
            torch.use_deterministic_algorithms(False)
        if num_rows:
            close(out, reference.few_rows(x, weight, own))
        else:
            assert out.shape == (0, num_cols)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [24, 128, 200])
@pytest.mark.parametrize(
    "plan", [None, SMALL._replace(split=2), SMALL._replace(cols=24, swap_ab=True)]
)
def test_gated_product_of_a_norm(inner, dtype, plan):
    """Halves may begin within a block."""
    x = normed(5, 160, dtype)[2]
    _, weight, bias = case(1, 2 * inner, 160, dtype)
    ours = kernel.few_rows_gated(x, weight, bias, plan)
    close(ours, reference.few_rows_gated(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [1, 2])
def test_sum_and_norm_at_its_end(dtype, split):
    x, weight, bias = case(3, 140, 256, dtype)
    residual, norm = case(3, 1, 140, dtype, seed=1)[0], torch.rand(140).to(DEVICE, dtype)
    arguments = (x, weight, bias, residual, norm, 1e-5)
    ours, summed = kernel.few_rows_add_norm(*arguments, SMALL._replace(split=split))
    expected, sums = reference.few_rows_add_norm(*arguments)
    close(summed, sums)
    close(ours.rows * ours.scale(), expected.rows * expected.scale())


def test_every_few_rows_have_a_plan():
    _, weight, _ = case(1, 70, 130, torch.bfloat16)
    for num_rows in (1, 17, FP8_ROWS):
        x = torch.zeros(num_rows, 130, device=DEVICE)
        for rows in (x, x.bfloat16(), x.half()):
            assert plan_for(rows, weight) is not None
            assert plan_for(rows, weight, gated=True) is not None
    assert plan_for(torch.zeros(FP8_ROWS + 1, 130, device=DEVICE), weight) is None
    assert plan_for(torch.zeros(0, 130, device=DEVICE), weight) is None


def test_compiles_for_sm90():
    """A weight becomes bf16 in registers, where a product takes it; nothing converts one by one."""
    shapes = [
        (6144, 4096, False, "8n"),
        (4096, 14336, False, "8s"),
        (4096, 4096, False, "8s"),
        (14336, 4096, True, "8n"),
        (576, 200, False, "8"),
        (18432, 4096, False, "8n"),
        (10944, 2048, True, "8n"),  # the upper half begins within a block
        (10952, 2048, True, "8n"),  # and within a tile
    ]
    cases = [
        (*shape, gated, fp8_plan(rows, *shape, gated=gated), rows, ending)
        for *shape, gated, ending in shapes
        for rows in (4, 32, 64)
    ]
    for case, built in zip(cases, compile_sm90([compiled(*case) for case in cases]), strict=True):
        assert built.spilled == 0
        assert "fma.rn.bf16x2" in built.ptx
        assert "e4m3x2" not in built.ptx
        assert "mma" in built.ptx
        _, _, gated, plan, rows, _ = case
        if rows == 32 and plan.warps == 2:  # two warps never convert the same weight
            weights = plan.cols * plan.step * (2 if gated else 1)
            assert built.ptx.count("fma.rn.bf16x2") == weights // (2 * 32 * plan.warps)
