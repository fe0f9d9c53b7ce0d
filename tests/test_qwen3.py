"""Qwen3 against transformers, and under speculation."""

import families
import pytest
import tiny
import torch

from specdec.errors import CheckpointError
from specdec.models.layers import map_tree, unpack
from specdec.models.load import load_target, open_checkpoint, read_config
from specdec.models.parts import named_tensors, read_layout
from specdec.models.qwen3 import qwen3_target
from specdec.models.qwen3_checkpoint import qwen3_config, qwen3_config_json, qwen3_layout

TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # twice hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {
    "untied": {},
    "tied_yarn": {"tie_word_embeddings": True, "rope_parameters": YARN},
    "biased": {"attention_bias": True, "rms_norm_eps": 1e-5},
    "odd": {
        "hidden_size": 42,
        "intermediate_size": 51,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "vocab_size": 67,
        "num_hidden_layers": 3,
    },
}


def write(folder, seed=0, **overrides):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{**TINY, **overrides}, attn_implementation="eager")
    return families.write_model(folder, Qwen3ForCausalLM(config), seed)


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


def test_bfloat16_stays_near_float32(folder):
    families.check_bfloat16(load_target(folder), load_target(folder, dtype="bfloat16"), 3)


def test_head_dim_is_the_configs_own(folder):
    assert load_target(folder).config.head_dim == 16
    settings = {**read_config(folder), "head_dim": None}
    assert qwen3_config(settings).head_dim == 128


def test_every_tensor_survives_reading_and_writing(folder):
    checkpoint, config = open_checkpoint(folder), qwen3_config(read_config(folder))
    layout = qwen3_layout(config)
    params = read_layout(checkpoint, layout, "cpu", torch.float32)
    written = named_tensors(params, layout)
    assert written.keys() == set(checkpoint)
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in written.items())
    assert qwen3_config(qwen3_config_json(config)) == config
    plain = tiny.logits(qwen3_target(params, config))
    assert torch.equal(plain, tiny.logits(load_target(folder)))


def test_packing_keeps_every_number(folder):
    target = load_target(folder)
    layout = qwen3_layout(target.config)
    plain = read_layout(open_checkpoint(folder), layout, "cpu", torch.float32)
    packed = map_tree(unpack, target.params)
    named = [named_tensors(tree, layout) for tree in (plain, packed)]
    assert all(torch.equal(named[0][name], named[1][name]) for name in named[0])


def test_unsupported_settings_and_bad_checkpoints_are_named(tmp_path, folder):
    settings = read_config(folder)
    sliding = {**settings, "use_sliding_window": True}
    tiny.one_line_error(lambda: qwen3_config(sliding), CheckpointError, "use_sliding_window")
    config = qwen3_config(settings)
    state = families.random_state(qwen3_layout(config))
    name = "model.layers.1.self_attn.k_norm.weight"
    del state[name]
    broken = tiny.write_checkpoint(tmp_path / "a", settings, dict(state))
    tiny.one_line_error(lambda: load_target(broken), CheckpointError, f"lacks {name}$")
    state |= {name: torch.ones(16), "model.layers.1.self_attn.v_norm.weight": torch.ones(16)}
    extra = tiny.write_checkpoint(tmp_path / "b", settings, dict(state))
    tiny.one_line_error(lambda: load_target(extra), CheckpointError, "unknown.*v_norm")
    quantised = {**settings, "quantization_config": {"quant_method": "awq"}}
    awq = tiny.write_checkpoint(tmp_path / "c", quantised, dict(state))
    tiny.one_line_error(lambda: load_target(awq), CheckpointError, "quant_method='awq'")
