"""Layers and heads whose products run on the few-row kernel, and what they hand to each other."""

from dataclasses import replace

import pytest
import torch
from families import relative_error
from small_shapes import small_shape

from specdec.experiments.targets import new_target
from specdec.kernels.few_rows import kernel
from specdec.kernels.few_rows import plan as plans
from specdec.kernels.few_rows.plan import Plan, product_plan
from specdec.kernels.few_rows.reference import Normed
from specdec.kernels.runtime import using
from specdec.models import layers
from specdec.models.axes import FAMILIES
from specdec.models.eagle import EagleConfig, eagle_block, init_head
from specdec.models.quantize import to_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Plan(cols=16, step=32, split=2, warps=2, stages=3)


def random(*shapes, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.randn(shape).div(shape[-1] ** 0.5).to(DEVICE, dtype) for shape in shapes]


@pytest.fixture
def planned(monkeypatch):
    """Every product has a plan, but of matrices in the list that this gives."""
    left = []

    def plan(x, weight, gated=False):
        known = any(weight is matrix for matrix in left)
        return None if known or not layers.uses_triton() else SMALL

    monkeypatch.setattr(layers, "_few_rows_plan", plan)
    return left


def test_layers_run_it_where_it_is_planned(monkeypatch):
    seen = []

    def spy(x, weight, bias=None, plan=None):
        seen.append((x.shape[0], weight.shape[0], plan))
        return x.new_zeros(x.shape[0], plan.cols)

    monkeypatch.setattr(kernel, "few_rows", spy)
    x, router, small = torch.randn(4, 512), torch.randn(128, 512), torch.randn(8, 512)
    x, router, small = (tensor.to(DEVICE, torch.bfloat16) for tensor in (x, router, small))
    layers.linear(x, router)
    with using("triton"):
        layers.linear(x, small)
        layers.linear(x.repeat(9, 1), router)
        layers.linear(x.float(), router.float())
        assert not seen
        layers.linear(x, router)
    assert seen == [(4, 128, product_plan(4, 128, 512))]


def test_a_feed_forward_part_on_kernels(monkeypatch):
    """The same numbers as in torch, where plans give it to the kernel and where they do not."""
    x, gate_up, gate_up_bias = random((2, 512), (2 * 512, 512), (2 * 512,))
    down, bias = random((576, 512), (576,))

    def feed_forward():
        inner = layers.gated_part(x, gate_up, gate_up_bias)
        return layers.made(layers.product(inner, down, bias))

    expected = feed_forward()
    for plan in (None, Plan(cols=32, step=128, split=1, warps=4, stages=3)):
        monkeypatch.setitem(plans.GATED, 16, ((plans.ANY, plans.ANY, plan),))
        with using("triton"):
            ours = feed_forward()
        assert relative_error(ours.float(), expected.float()) < 2e-2


@pytest.mark.parametrize(
    "case", ["all", "no stream", "no norm", "zero-centred", "strided", "no reader", "not planned"]
)
def test_a_norm_after_a_product(case, planned):
    """It is left to its reader only where everything is there for that; the numbers stay."""
    x, weight, bias, norm = random((2, 3, 40), (48, 40), (48,), (48,), dtype=torch.float32)
    wide, reader = random((2, 3, 100), (2 * 24, 48), dtype=torch.float32)
    residual = wide[..., :48] if case == "strided" else wide[..., :48].contiguous()
    if case == "not planned":
        planned.append(reader)
    options = {
        "reader": None if case == "no reader" else reader,
        "gated": True,
        "zero_centred": case == "zero-centred",
    }

    def run():
        normed, summed = layers.add_rms_norm(
            layers.product(x, weight, bias),
            None if case == "no stream" else residual,
            None if case == "no norm" else norm,
            1e-5,
            **options,
        )
        return normed, summed, layers.gated_part(normed, reader)

    expected = run()
    with using("triton"):
        ours = run()
    assert isinstance(ours[0], Normed) == (case == "all")
    assert not isinstance(expected[0], Normed)
    for mine, theirs in zip(ours[1:], expected[1:], strict=True):
        assert mine.shape == theirs.shape
        assert relative_error(mine, theirs) < 1e-5


def test_a_norm_whose_reader_has_no_plan(planned):
    """It is divided before."""
    stream, norm, matrix = random((3, 48), (48,), (64, 48), dtype=torch.float32)
    squares = stream.square().sum(-1, keepdim=True)
    x = Normed(stream * norm, squares, 1e-5)
    expected = layers.linear(layers.rms_norm(stream, norm, 1e-5), matrix)
    planned.append(matrix)
    for kernels in ("torch", "triton"):
        with using(kernels):
            assert relative_error(layers.linear(x, matrix), expected) < 1e-5
            assert relative_error(layers.gated_part(x, matrix), layers.swiglu(expected)) < 1e-5
            assert isinstance(layers.product(x, matrix), torch.Tensor)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_norm_that_a_quantised_matrix_reads(kernels):
    stream, norm, matrix = random((3, 512), (512,), (128, 512))
    x = Normed(stream * norm, stream.float().square().sum(-1, keepdim=True), 1e-5)
    whole, weight = layers.rms_norm(stream, norm, 1e-5), to_fp8(matrix)
    with using(kernels):
        left = layers.product(x, weight)
        assert isinstance(left, torch.Tensor) == (kernels == "torch")
        ours, expected = layers.linear(x, weight), layers.linear(whole, weight)
        assert torch.equal(layers.made(left), ours)
    assert relative_error(ours.float(), expected.float()) < 1e-2


HEADS = {
    "llama_eagle": {},
    "qwen3_eagle": {},
    "qwen3_moe_eagle": {},
    "llama_eagle3": {},
    "qwen3_eagle3": {},
    "normed residual": {"residual": "normed"},
    "ernie_mtp": {},
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name, planned, monkeypatch):
    """Two layers, in a stack or in turn: products between them and at the end."""
    family = name if name in FAMILIES else "llama_eagle3"
    axes = replace(FAMILIES[family].axes, **HEADS[name])
    block = new_target(small_shape(axes.block), seed=1).config
    config = EagleConfig(replace(block, num_layers=2), axes)
    aux = {"aux_layers": (0, 1, 3), "aux_size": 32} if "eagle3" in family else {}
    head = init_head(config.block, axes, std=0.5, device=DEVICE, **aux)
    generator = torch.Generator().manual_seed(3)
    head = layers.map_tree(
        lambda t: t + 0.3 * torch.randn(t.shape, generator=generator).to(DEVICE), head
    )
    embeds, hidden = torch.randn(2, 5, 32, generator=generator).to(DEVICE)
    ends, add_norm = [], kernel.few_rows_add_norm
    monkeypatch.setattr(
        kernel, "few_rows_add_norm", lambda *args: ends.append(1) or add_norm(*args)
    )

    def run(step):
        positions = torch.arange(5, device=DEVICE)
        attend = lambda query, key, value, layer: query  # noqa: E731
        return eagle_block(head, config, embeds, hidden, positions, attend, step)

    for step in range(2):
        expected = run(step)
        with using("triton"):
            ours = run(step)
        for mine, theirs in zip(ours, expected, strict=True):
            assert relative_error(mine, theirs) < 1e-5
    assert bool(ends) == (axes.block != "qwen3_moe")  # whose experts are no product of few rows
