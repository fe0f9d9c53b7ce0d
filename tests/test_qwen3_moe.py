"""Qwen3-MoE against transformers, in both expert layouts, and under speculation."""

import families
import pytest
import tiny
import torch
from test_qwen3 import TINY as DENSE

from specdec.errors import CheckpointError
from specdec.models.load import load_target, open_checkpoint, read_config
from specdec.models.moe import Mlp, SoftmaxMoe
from specdec.models.parts import named_tensors, read_layout
from specdec.models.qwen3_moe_checkpoint import (
    qwen3_moe_config,
    qwen3_moe_config_json,
    qwen3_moe_layout,
)

TINY = DENSE | {
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
VARIANTS = {
    "normalised": {},
    "not_normalised_tied": {"norm_topk_prob": False, "tie_word_embeddings": True},
    "sparse_step": {"decoder_sparse_step": 2, "num_experts_per_tok": 8},
    "mlp_only": {"mlp_only_layers": [0, 2], "num_experts_per_tok": 1, "attention_bias": True},
    "odd": {
        "hidden_size": 42,
        "intermediate_size": 51,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "vocab_size": 67,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 13,
    },
}


def write(folder, seed=0, save=None, **overrides):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{**TINY, **overrides}, attn_implementation="eager", experts_implementation="eager"
    )
    return families.write_model(folder, Qwen3MoeForCausalLM(config), seed, **(save or {}))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """(our target, transformers' model) from one checkpoint that transformers wrote."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write(folder, **VARIANTS[request.param])
    return load_target(folder), theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    write(folder)
    return folder


@pytest.mark.parametrize("chunk", [0, 1, 3, 7])
def test_logits_equal_transformers_whole_and_in_chunks(pair, chunk):
    families.check_chunks(*pair, chunk)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_decode_rows_equal_transformers(pair, block_size):
    families.check_decode(*pair, block_size)


def test_a_rejected_draft_leaves_no_trace(pair):
    families.check_rejected_rows(*pair)


def test_captured_streams_are_transformers_hidden_states(pair):
    ours, theirs = pair
    families.check_captured(ours, theirs, theirs.model.norm.weight, ours.config.rms_norm_eps)


def test_packed_texts_equal_transformers(pair):
    families.check_packed(*pair)


@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_is_unchanged_by_speculation(folder, batch):
    families.check_greedy_is_unchanged(load_target(folder), batch)


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        ({}, [SoftmaxMoe, SoftmaxMoe, SoftmaxMoe]),
        ({"decoder_sparse_step": 2}, [Mlp, SoftmaxMoe, Mlp]),
        ({"mlp_only_layers": [0, 2]}, [Mlp, SoftmaxMoe, Mlp]),
        ({"mlp_only_layers": [1]}, [SoftmaxMoe, Mlp, SoftmaxMoe]),
        ({"num_experts": 0}, [Mlp, Mlp, Mlp]),
    ],
)
def test_which_blocks_have_experts(overrides, kinds):
    config = qwen3_moe_config({**TINY, **overrides})
    assert [type(layer.mlp) for layer in qwen3_moe_layout(config).layers] == kinds


def test_normalising_the_weights_matters(folder):
    settings = read_config(folder) | {"norm_topk_prob": False}
    tensors = {name: open_checkpoint(folder)[name] for name in open_checkpoint(folder)}
    other = load_target(tiny.write_checkpoint(folder / "other", settings, tensors))
    assert families.relative_error(tiny.logits(other), tiny.logits(load_target(folder))) > 1e-2


def test_fused_experts_give_the_same_model(folder, tmp_path):
    """transformers' own layout, all experts in one tensor, against one by one."""
    write(tmp_path, save={"save_original_format": False})
    names = set(open_checkpoint(tmp_path))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in set(open_checkpoint(folder))
    assert torch.equal(tiny.logits(load_target(tmp_path)), tiny.logits(load_target(folder)))


@pytest.mark.parametrize("fused", [False, True])
def test_every_tensor_survives_reading_and_writing(fused):
    config = qwen3_moe_config({**TINY, "mlp_only_layers": [1]})
    layout = qwen3_moe_layout(config, fused=fused)
    state = families.random_state(layout)
    written = named_tensors(read_layout(state, layout, "cpu", torch.float32), layout)
    assert written.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in written.items())
    assert qwen3_moe_config(qwen3_moe_config_json(config)) == config


def test_both_spellings_of_the_number_of_experts():
    """Published configs say num_experts, transformers 5 writes num_local_experts."""
    theirs = {**TINY, "num_local_experts": TINY["num_experts"]}
    del theirs["num_experts"]
    assert qwen3_moe_config(theirs) == qwen3_moe_config(TINY)


def test_bad_settings_and_checkpoints_are_named(tmp_path):
    def refused(match, **overrides):
        settings = {**TINY, **overrides}
        tiny.one_line_error(lambda: qwen3_moe_config(settings), CheckpointError, match)

    refused("lacks 'num_experts'", num_experts=None)
    refused("lacks 'moe_intermediate_size'", moe_intermediate_size=None)
    refused("num_experts_per_tok=9 is not within 8", num_experts_per_tok=9)
    refused("lacks 'hidden_size'", hidden_size=None)
    settings = {**TINY, "model_type": "qwen3_moe"}
    state = families.random_state(qwen3_moe_layout(qwen3_moe_config(settings)))
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    tensor = state.pop(name)
    folder = tiny.write_checkpoint(tmp_path / "a", settings, dict(state))
    tiny.one_line_error(lambda: load_target(folder), CheckpointError, f"lacks {name}$")
    state[name] = tensor[:-1].clone()
    folder = tiny.write_checkpoint(tmp_path / "b", settings, dict(state))
    tiny.one_line_error(lambda: load_target(folder), CheckpointError, r"up_proj.*\[23, 32\]")
