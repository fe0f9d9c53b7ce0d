"""Targets with quantised matrices: what is kept, what it computes, what is refused."""

import sys
from types import SimpleNamespace

import pytest
import tiny
import torch
from running import requests, tiny_engine
from small_shapes import small_shape
from test_fp8 import quantised as fp8_checkpoints

from specdec.errors import CheckpointError
from specdec.experiments.random_models import random_target
from specdec.generate import generate
from specdec.kernels.few_rows.reference import Fp8Weight, dequantise
from specdec.kernels.runtime import using
from specdec.models.layers import linear, tree_leaves
from specdec.models.load import load_target, open_checkpoint
from specdec.models.quantize import quantised as quantised_form
from specdec.models.quantize import quantising, stack_fp8, to_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
quantised = fp8_checkpoints  # a fixture: DeepSeek checkpoints in fp8 and what they stand for


def plain_again(tree):
    """The tree with every fp8 matrix in fp32."""
    if isinstance(tree, Fp8Weight):
        return dequantise(*tree)
    if isinstance(tree, tuple):
        items = [plain_again(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def fp8_weights(tree):
    if isinstance(tree, Fp8Weight):
        return [tree]
    return [w for item in tree for w in fp8_weights(item)] if isinstance(tree, tuple) else []


def size(tree):
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (130, 100), (300, 257)])
def test_rounding_uses_each_blocks_whole_range(shape):
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    data, scale = to_fp8(weight)
    assert scale.shape == tuple(-(-n // 128) for n in shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            assert data[block].float().abs().max() == 448
            limit = weight[block].abs() / 16 + scale[i, j] * 2**-10
            assert ((dequantise(data, scale)[block] - weight[block]).abs() <= limit).all()


def test_zeros_stay_zeros():
    data, scale = to_fp8(torch.zeros(130, 40))
    assert not dequantise(data, scale).any()


def test_matrices_stack_at_block_borders_only():
    parts = [to_fp8(torch.randn(rows, 140)) for rows in (128, 256, 70)]
    stacked = stack_fp8(parts)
    assert torch.equal(dequantise(*stacked), torch.cat([dequantise(*part) for part in parts]))
    assert stack_fp8([parts[2], parts[0]]) is None


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_linear_takes_it(rows, kernels):
    """In two and in three dimensions, few rows and many."""
    weight = to_fp8(torch.randn(150, 200, device=DEVICE))
    x, bias = torch.randn(rows, 2, 200, device=DEVICE), torch.randn(150, device=DEVICE)
    with using(kernels):
        out = linear(x, weight, bias)
    expected = x @ dequantise(*weight).T + bias
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


FAMILIES = ["llama", "qwen3", "qwen3_moe", "qwen3_next", "deepseek"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_dequantised_weights(family):
    """Every family: fp8 matrices compute what the same numbers in fp32 do."""
    settings = small_shape(family)
    target = random_target(settings, device="cpu", dtype=torch.float32, quantize="fp8")
    plain = random_target(settings, device="cpu", dtype=torch.float32)
    assert fp8_weights(target.params.layers)
    assert isinstance(target.lm_head, torch.Tensor)
    from specdec.models.load import FAMILIES as LOADERS

    exact = LOADERS[settings["model_type"]].target(
        plain_again(target.params._replace(lm_head=target.lm_head)), target.config, None
    )
    found, expected = tiny.logits(target), tiny.logits(exact)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    rounded = (found - tiny.logits(plain)).norm() / tiny.logits(plain).norm()
    assert 1e-5 < rounded < 0.1


def test_bytes_are_halved():
    settings = small_shape("llama") | {"hidden_size": 256, "intermediate_size": 512}
    plain = random_target(settings, device="cpu", dtype=torch.bfloat16)
    target = random_target(settings, device="cpu", dtype=torch.bfloat16, quantize="fp8")
    assert size(target.params.layers) < 0.51 * size(plain.params.layers)


def test_an_engine_decodes_with_it():
    target = random_target(small_shape("llama"), device="cpu", dtype=torch.float32, quantize="fp8")
    found = [
        [r.token_ids for r in generate(engine, requests([[7, 3, 60], [11]], max_tokens=8))]
        for engine in (tiny_engine(target, eos=()), tiny_engine(target, eos=(), max_num_seqs=1))
    ]
    assert found[0] == found[1]


def test_an_fp8_checkpoint_is_kept_bit_for_bit(quantised):
    """Of DeepSeek: the matrices that `linear` multiplies; kv_b, which it does not, is plain. Other
    blocks than 128 x 128, and parts that end inside one (gate of 150 rows), are rounded anew."""
    folder, _, exact = quantised
    params = load_target(folder, quantize="fp8").params
    is_kept = bool(open_checkpoint(folder).scaled)
    for index, layer in enumerate(params.layers):
        assert isinstance(layer.attention.kv_up, torch.Tensor)
        for field, name in {
            "q_down": "q_a_proj",
            "q_up": "q_b_proj",
            "kv_down": "kv_a_proj_with_mqa",
            "out": "o_proj",
        }.items():
            found = dequantise(*getattr(layer.attention, field))
            expected = exact[f"model.layers.{index}.self_attn.{name}.weight"]
            assert torch.equal(found, expected) == is_kept
            assert (found - expected).norm() < 0.04 * expected.norm()
    gate_up = torch.cat(
        [exact[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    )
    found = dequantise(*params.layers[0].mlp.gate_up)
    assert 0 < (found - gate_up).norm() < 0.04 * gate_up.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_weights_that_are_no_numbers_are_refused(dtype):
    """A byte that is NaN is a number to the kernel."""
    weight = torch.randn(150, 200)
    weight[3, 5] = float("nan")
    matrix = weight.bfloat16() if dtype == torch.bfloat16 else to_fp8(weight)
    with quantising("fp8"):
        tiny.one_line_error(lambda: quantised_form(matrix), CheckpointError, "150 x 200 .* NaN")
        assert isinstance(quantised_form(torch.randn(150, 200)), Fp8Weight)


def test_an_unknown_kind_is_named():
    tiny.one_line_error(
        lambda: quantising("fp4").__enter__(),
        CheckpointError,
        r"^quantize='fp4' is not one of none, fp8, int8, int4$",
    )


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_torchao_is_asked_for_by_name(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    tiny.one_line_error(
        lambda: random_target(
            small_shape("llama"), device="cpu", dtype=torch.bfloat16, quantize=kind
        ),
        CheckpointError,
        rf"^quantize={kind} needs torchao, which is not installed; `pip install torchao`",
    )


@pytest.mark.parametrize("size", [64, 128])
def test_int4_on_a_cpu_is_refused_before_anything_is_tried(size, monkeypatch):
    """Also rows that are no multiple of 128, of which torchao only says that it skips them."""
    tried = []
    names = dict.fromkeys(("Int4WeightOnlyConfig", "Int8WeightOnlyConfig"), dict)
    torchao = SimpleNamespace(quantize_=lambda *args: tried.append(args), **names)
    monkeypatch.setitem(sys.modules, "torchao.quantization", torchao)
    settings = small_shape("llama") | {"hidden_size": size, "intermediate_size": 2 * size}
    tiny.one_line_error(
        lambda: random_target(settings, device="cpu", dtype=torch.bfloat16, quantize="int4"),
        CheckpointError,
        r"^quantize=int4 needs a GPU, and the weights are on the CPU; use quantize=int8, fp8 ",
    )
    assert not tried


@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=pytest.mark.gpu)])
def test_torchao(kind):
    pytest.importorskip("torchao")
    settings = small_shape("llama") | {"hidden_size": 256, "intermediate_size": 512}
    place = {"device": DEVICE, "dtype": torch.bfloat16}
    plain = random_target(settings, **place)
    target = random_target(settings, **place, quantize=kind)
    layer = target.params.layers[0]
    assert type(layer.qkv).__module__.startswith("torchao")
    cache = [tiny.new_cache(t, 4, 4) for t in (plain, target)]
    prompt = [5, 9, 20, 33, 7]
    expected, found = (
        t.logits(tiny.prefill(t, [prompt], c, 4)[0]).float()
        for t, c in zip((plain, target), cache, strict=True)
    )
    limit = {"int8": 0.03, "int4": 0.3}[kind]
    assert 0 < (found - expected).norm() / expected.norm() < limit
