"""DeepSeek-V3 against transformers, its cache, its spare layers, and under speculation."""

import math

import families
import pytest
import tiny
import torch

from specdec.errors import CheckpointError
from specdec.models.batch import CacheShape
from specdec.models.deepseek import DeepseekMoe
from specdec.models.deepseek_checkpoint import (
    deepseek_config,
    deepseek_config_json,
    deepseek_layer_layout,
    deepseek_layout,
)
from specdec.models.load import build_target, load_target, open_checkpoint, read_config
from specdec.models.moe import Mlp
from specdec.models.parts import named_tensors, read_layout

TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
VARIANTS = {
    "yarn": {"rope_parameters": YARN},
    "other_mscale": {"rope_parameters": {**YARN, "mscale": 0.707}, "attention_bias": True},
    "plain_query": {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
    "one_group": {
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "q_lora_rank": None,
    },
    "odd": {
        "hidden_size": 42,
        "intermediate_size": 51,
        "moe_intermediate_size": 13,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 11,
        "kv_lora_rank": 9,
        "qk_nope_head_dim": 5,
        "v_head_dim": 3,
        "n_routed_experts": 15,
        "n_group": 5,
        "topk_group": 3,
        "num_experts_per_tok": 7,
        "first_k_dense_replace": 0,
        "vocab_size": 67,
        "rope_parameters": YARN,
    },
}


def write(folder, seed=0, save=None, **overrides):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **{**TINY, **overrides}, attn_implementation="eager", experts_implementation="eager"
    )
    return families.write_model(folder, DeepseekV3ForCausalLM(config), seed, **(save or {}))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """(our target, transformers' model) from one checkpoint that transformers wrote."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write(folder, **VARIANTS[request.param])
    return load_target(folder), theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    write(folder, rope_parameters=YARN)
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


def test_the_cache_holds_one_latent_a_token(folder):
    target = load_target(folder)
    cache = target.new_cache(CacheShape(8, 4, 1, 4))
    assert [tuple(keys.shape) for keys in cache.keys] == [(8, 4, 1, 12 + 6)] * 3
    assert cache.values == ()
    batch = tiny.make_batch([tiny.Step([5, 9, 20], 0, [3])], 4)
    target.forward(batch, cache)
    for keys in cache.keys:
        latent = keys[3, :3, 0, :12]
        assert (latent.square().mean(-1) > 0).all()
        assert (keys[[1, 2, 4, 5, 6, 7]] == 0).all()
        assert (keys[3, 3:] == 0).all()


def test_scale_of_the_public_config():
    """1 / sqrt(192), times (0.1 ln 40 + 1) squared."""
    config = deepseek_config(
        {
            **TINY,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_theta": 10000,
            "rope_scaling": {**YARN, "type": "yarn", "factor": 40}
            | {"original_max_position_embeddings": 4096},
        }
    )
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.rope.attention_factor == 1.0
    assert deepseek_config({**TINY}).attention_scale == 16**-0.5


@pytest.mark.parametrize("name", ["rope_interleave", "norm_topk_prob", "routed_scaling_factor"])
def test_each_setting_matters(folder, name):
    settings = read_config(folder)
    changed = settings | {name: 1.0 if name == "routed_scaling_factor" else not settings[name]}
    logits = [tiny.logits(build_target(open_checkpoint(folder), s)) for s in (settings, changed)]
    assert families.relative_error(logits[1], logits[0]) > 1e-3


def test_the_correction_bias_stays_in_float32(tmp_path):
    """A bias of 7e-4 between two experts decides; in bf16 beside 1 it would vanish."""
    config = deepseek_config({**TINY, "first_k_dense_replace": 0})
    state = families.random_state(deepseek_layout(config))
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    state[name] = torch.full((8,), 1.0) + torch.arange(8) * 1e-4
    settings = {**TINY, "first_k_dense_replace": 0}
    target = build_target(state, {**settings, "model_type": "deepseek_v3"}, dtype="bfloat16")
    moe = target.params.layers[0].mlp
    assert torch.equal(moe.correction, state[name])
    assert moe.gate.dtype == torch.float32
    assert target.params.layers[0].input_norm.dtype == torch.bfloat16


def test_which_blocks_have_experts():
    config = deepseek_config({**TINY, "first_k_dense_replace": 2})
    assert [type(layer.mlp) for layer in deepseek_layout(config).layers] == [Mlp, Mlp, DeepseekMoe]


def test_fused_experts_give_the_same_model(folder, tmp_path):
    """transformers' own layout, all experts in one tensor, against one by one."""
    write(tmp_path, save={"save_original_format": False}, rope_parameters=YARN)
    assert "model.layers.1.mlp.experts.gate_up_proj" in set(open_checkpoint(tmp_path))
    assert torch.equal(tiny.logits(load_target(tmp_path)), tiny.logits(load_target(folder)))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_mtp_layers_are_left_to_the_head(folder, tmp_path, num_layers):
    """C2: layers past the last one change nothing, and none past those is accepted."""
    settings = read_config(folder) | {"num_nextn_predict_layers": num_layers}
    checkpoint, config = open_checkpoint(folder), deepseek_config(settings)
    extra = {}
    for index in range(3, 3 + num_layers):
        prefix = f"model.layers.{index}."
        layout = deepseek_layer_layout(config, prefix, experts=True, fused=False)
        extra |= families.random_state(layout)
        extra |= {f"{prefix}{name}.weight": torch.ones(32) for name in ("enorm", "hnorm")}
        extra |= {f"{prefix}eh_proj.weight": torch.ones(32, 64)}
        extra |= {f"{prefix}shared_head.head.weight": torch.ones(101, 32)}
    state = {name: checkpoint[name] for name in checkpoint} | extra
    with_head = tiny.write_checkpoint(tmp_path / "a", settings, state)
    assert torch.equal(tiny.logits(load_target(with_head)), tiny.logits(load_target(folder)))
    state[f"model.layers.{3 + num_layers}.enorm.weight"] = torch.ones(32)
    too_many = tiny.write_checkpoint(tmp_path / "b", settings, state)
    match = rf"unknown tensors: model.layers.{3 + num_layers}.enorm"
    tiny.one_line_error(lambda: load_target(too_many), CheckpointError, match)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_survives_reading_and_writing(variant):
    config = deepseek_config({**TINY, **VARIANTS[variant]})
    layout = deepseek_layout(config)
    state = families.random_state(layout)
    written = named_tensors(read_layout(state, layout, "cpu", torch.float32), layout)
    assert written.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in written.items())
    assert deepseek_config(deepseek_config_json(config)) == config


def test_bad_settings_and_checkpoints_are_named(tmp_path):
    def refused(match, **overrides):
        settings = {**TINY, **overrides}
        tiny.one_line_error(lambda: deepseek_config(settings), CheckpointError, match)

    refused("lacks 'kv_lora_rank'", kv_lora_rank=None)
    refused("scoring_func='softmax'", scoring_func="softmax")
    refused("topk_method='greedy'", topk_method="greedy")
    refused("n_group=3", n_group=3)
    refused("topk_group=5", topk_group=5)
    refused("n_group=8 leaves fewer than 2", n_group=8)
    refused("num_experts_per_tok=5", num_experts_per_tok=5)
    settings = {**TINY, "model_type": "deepseek_v3"}
    state = families.random_state(deepseek_layout(deepseek_config(settings)))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    del state[name]
    folder = tiny.write_checkpoint(tmp_path, settings, dict(state))
    tiny.one_line_error(lambda: load_target(folder), CheckpointError, f"lacks {name}$")
