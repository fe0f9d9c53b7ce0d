"""Block-scaled fp8 checkpoints: dequantised on load, odd sizes included."""

import json
import re

import families
import pytest
import tiny
import torch
from test_deepseek import TINY

from specdec.errors import CheckpointError
from specdec.models.fp8 import dequantise
from specdec.models.load import load_target, open_checkpoint, read_config

SIZES = {  # hidden and inner sizes that end inside a block of 128, or of 16 x 24
    "hidden_size": 200,
    "intermediate_size": 150,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "q_lora_rank": 130,
    "kv_lora_rank": 24,
}
KEPT = ("embed_tokens", "lm_head", "norm", "gate.weight", "e_score_correction_bias")


def quantise(weight, block):
    """One block at a time: fp8 numbers and the factors that undo the scaling."""
    rows, columns = block
    shape = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    scale, out = torch.zeros(shape), torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    exact = torch.zeros(weight.shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            where = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[where].abs().max() / 448
            out[where] = (weight[where] / scale[i, j]).to(torch.float8_e4m3fn)
            exact[where] = out[where].float() * scale[i, j]
    return out, scale, exact


@pytest.fixture(scope="module", params=[(128, 128), (16, 24)], ids=str)
def quantised(request, tmp_path_factory):
    """(folder of an fp8 checkpoint, transformers' model with the exact weights, those weights)."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    folder, block = tmp_path_factory.mktemp("fp8"), request.param
    config = DeepseekV3Config(
        **{**TINY, **SIZES}, attn_implementation="eager", experts_implementation="eager"
    )
    theirs = families.write_model(folder / "plain", DeepseekV3ForCausalLM(config))
    plain = open_checkpoint(folder / "plain")
    exact, shards = {}, [{}, {}]
    for number, name in enumerate(plain):
        if any(word in name for word in KEPT):
            exact[name] = shards[number % 2][name] = plain[name].clone()
            continue
        weight, scale, exact[name] = quantise(plain[name], block)
        shards[number % 2][name] = weight
        shards[(number + 1) % 2][f"{name}_scale_inv"] = scale  # scales in the other shard
    settings = read_config(folder / "plain")
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    write_shards(folder / "fp8", settings | {"quantization_config": method}, shards)
    reference = tiny.write_checkpoint(folder / "exact", settings, exact)
    theirs = DeepseekV3ForCausalLM.from_pretrained(
        reference, attn_implementation="eager", experts_implementation="eager"
    )
    return folder / "fp8", theirs.float().eval(), exact


def write_shards(folder, settings, shards):
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    weight_map = {}
    for number, tensors in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_weights_are_dequantised_exactly(quantised):
    folder, _, exact = quantised
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint) == set(exact)
    for name, tensor in exact.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint[name].dtype == torch.float32
        assert torch.equal(checkpoint[name], tensor)


def test_logits_equal_transformers(quantised):
    folder, theirs, _ = quantised
    target = load_target(folder)
    families.check_chunks(target, theirs, 0)
    families.check_decode(target, theirs, 5)


def test_one_rounding_to_the_models_dtype(quantised):
    folder, _, exact = quantised
    target = load_target(folder, dtype="bfloat16")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert torch.equal(target.params.layers[1].mlp.experts.down[3], exact[name].bfloat16())


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 5), (3, 256, 130)])
def test_dequantise_odd_shapes(shape):
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)) + 0.5
    rows, columns = torch.arange(shape[-2]) // 128, torch.arange(shape[-1]) // 128
    expected = weight.float() * scale[..., rows[:, None], columns[None, :]]
    assert torch.equal(dequantise(weight, scale), expected)


def refused(folder, tensors, match, **settings):
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))

    def read():
        checkpoint = open_checkpoint(folder)
        return [checkpoint[name] for name in checkpoint]

    tiny.one_line_error(read, CheckpointError, match)


def test_scales_that_do_not_fit_are_named(tmp_path):
    weight = torch.zeros(200, 130, dtype=torch.float8_e4m3fn)
    scale = {"x.weight_scale_inv": torch.ones(2, 2)}
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    refused(tmp_path, scale, "x.weight_scale_inv without x.weight")
    short = {"x.weight": weight, "x.weight_scale_inv": torch.ones(1, 2)}
    refused(tmp_path, short, r"x.weight_scale_inv is \[1, 2\].*means \[2, 2\]")
    both = {"x.weight": weight, "y.weight": weight.clone(), **scale}
    refused(tmp_path, both, "y.weight is in torch.float8_e4m3fn without its y.weight_scale_inv")
    refused(tmp_path, {"x.weight": weight}, "without its x.weight_scale_inv", **fp8)


@pytest.mark.parametrize("block", [[128], [128, 128, 1], [0, 128], [128.0, 128.0], "128", ["a", 2]])
def test_a_block_size_that_is_none_is_named(block, tmp_path):
    weight = torch.zeros(200, 130, dtype=torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.weight_scale_inv": torch.ones(2, 2)}
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    refused(tmp_path, tensors, re.escape(f"weight_block_size={block!r} is not two"), **fp8)
