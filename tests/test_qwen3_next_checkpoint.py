"""Qwen3-Next and Qwen3.5 checkpoints: what is read, written, left alone, and refused."""

import json

import pytest
import tiny
import tiny_qwen3_next as tiny_next
import torch
from tiny_qwen3_next import QWEN3_NEXT_80B, VARIANTS

from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint
from specdec.models.layers import tree_leaves
from specdec.models.load import build_target
from specdec.models.parts import named_tensors, read_layout
from specdec.models.qwen3_next_checkpoint import (
    qwen3_next_config,
    qwen3_next_config_json,
    qwen3_next_layout,
)

PROMPT = [7, 3, 60, 2, 9, 9, 41, 5, 1, 13, 22]


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_settings_and_tensors_are_written_back(settings):
    config = qwen3_next_config(settings)
    assert qwen3_next_config(json.loads(json.dumps(qwen3_next_config_json(config)))) == config
    state, layout = tiny_next.state_of(settings), qwen3_next_layout(config)
    written = named_tensors(read_layout(state, layout, "cpu", torch.float32), layout)
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], state[name]) for name in state)


def with_mtp(state):
    """The checkpoint with an MTP head's tensors beside the model's."""
    block = {
        name.replace("model.layers.3.", "mtp.layers.0."): tensor
        for name, tensor in state.items()
        if name.startswith("model.layers.3.")
    }
    width = state["model.norm.weight"].numel()
    norms = ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")
    head = {f"mtp.{name}.weight": torch.ones(width) for name in norms}
    return tiny.InMemory({**state, **block, **head, "mtp.fc.weight": torch.ones(width, 2 * width)})


def test_the_target_ignores_the_mtp_head():
    settings = tiny_next.settings()
    state = tiny_next.state_of(settings)
    plain, beside = (build_target(s, settings) for s in (state, with_mtp(state)))
    assert torch.equal(tiny.logits(plain, PROMPT), tiny.logits(beside, PROMPT))


def test_wrong_checkpoints_are_named():
    settings = tiny_next.settings()
    state = tiny_next.state_of(settings)
    lacking = tiny.InMemory(state)
    del lacking["model.layers.1.linear_attn.dt_bias"]
    unknown = tiny.InMemory(state, **{"model.layers.1.linear_attn.extra": torch.ones(2)})
    for broken, match in (
        (lacking, "lacks model.layers.1.linear_attn.dt_bias"),
        (unknown, "unknown tensors: model.layers.1.linear_attn.extra"),
    ):
        tiny.one_line_error(lambda s=broken: build_target(s, settings), CheckpointError, match)
    for change, match in (
        ({"layer_types": ["linear_attention"] * 3}, "layer_types must name 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "it has 4: sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads=4 is not a multiple of"),
        ({"num_experts_per_tok": None}, "config.json lacks 'num_experts_per_tok'"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 is not within"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok=99 is not within"),
        ({"rope_parameters": {}, "partial_rotary_factor": 3}, "partial_rotary_factor=3 must be"),
    ):
        tiny.one_line_error(
            lambda c=change: qwen3_next_config({**settings, **c}), CheckpointError, match
        )


def test_a_text_model_beside_a_vision_tower():
    """Qwen3.5's published layout: nested settings, a longer prefix, a vision tower and an MTP head
    beside the text model."""
    settings = tiny_next.dense_settings()
    state = tiny_next.state_of(settings)
    nested = {name.replace("model.", "model.language_model.", 1): t for name, t in state.items()}
    nested |= {"model.visual.patch.weight": torch.ones(3), "mtp.norm.weight": torch.ones(32)}
    checkpoint = Checkpoint(
        state.path, {n: (tuple(t.shape), lambda t=t: t) for n, t in nested.items()}
    )
    outer = {"model_type": "qwen3_5", "text_config": settings, "vision_config": {"depth": 1}}
    ours, plain = build_target(checkpoint, outer), build_target(state, settings)
    assert torch.equal(tiny.logits(ours, PROMPT), tiny.logits(plain, PROMPT))


def published_80b():
    """Name -> shape of Qwen/Qwen3-Next-80B-A3B-Instruct, written out from its config."""

    def feed_forward(prefix):
        yield f"{prefix}gate.weight", (512, 2048)
        yield f"{prefix}shared_expert_gate.weight", (1, 2048)
        for name in ("shared_expert", *(f"experts.{e}" for e in range(512))):
            yield f"{prefix}{name}.gate_proj.weight", (512, 2048)
            yield f"{prefix}{name}.up_proj.weight", (512, 2048)
            yield f"{prefix}{name}.down_proj.weight", (2048, 512)

    def attention(prefix):
        yield f"{prefix}q_proj.weight", (8192, 2048)  # 16 heads of 256, and as many gates
        yield f"{prefix}k_proj.weight", (512, 2048)
        yield f"{prefix}v_proj.weight", (512, 2048)
        yield f"{prefix}o_proj.weight", (2048, 4096)
        yield f"{prefix}q_norm.weight", (256,)
        yield f"{prefix}k_norm.weight", (256,)

    def linear_attention(prefix):
        yield f"{prefix}in_proj_qkvz.weight", (12288, 2048)
        yield f"{prefix}in_proj_ba.weight", (64, 2048)
        yield f"{prefix}conv1d.weight", (8192, 1, 4)
        yield f"{prefix}A_log", (32,)
        yield f"{prefix}dt_bias", (32,)
        yield f"{prefix}norm.weight", (128,)
        yield f"{prefix}out_proj.weight", (2048, 4096)

    def layer(prefix, full):
        mixer = (
            attention(f"{prefix}self_attn.") if full else linear_attention(f"{prefix}linear_attn.")
        )
        yield from mixer
        yield from feed_forward(f"{prefix}mlp.")
        yield f"{prefix}input_layernorm.weight", (2048,)
        yield f"{prefix}post_attention_layernorm.weight", (2048,)

    yield "model.embed_tokens.weight", (151936, 2048)
    yield "lm_head.weight", (151936, 2048)
    yield "model.norm.weight", (2048,)
    for index in range(48):
        yield from layer(f"model.layers.{index}.", index % 4 == 3)
    yield "mtp.fc.weight", (2048, 4096)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        yield f"mtp.{name}.weight", (2048,)
    yield from layer("mtp.layers.0.", True)


def test_every_tensor_of_the_80b_checkpoint_has_its_place():
    """On the meta device: all tensors of the base model are read, those of the MTP head are left,
    none is unknown, and one more or one less is an error."""
    shapes, read = dict(published_80b()), []

    def reader(name):
        def tensor():
            read.append(name)
            return torch.empty(shapes[name], device="meta", dtype=torch.bfloat16)

        return tensor

    tensors = {name: (shape, reader(name)) for name, shape in shapes.items()}
    checkpoint = Checkpoint(tiny.InMemory.path, tensors)
    target = build_target(checkpoint, QWEN3_NEXT_80B, device="meta", dtype=torch.bfloat16)
    assert sorted(read) == sorted(name for name in shapes if not name.startswith("mtp."))
    held = sum(tensor.numel() for tensor in tree_leaves(target.params))
    assert held == sum(torch.Size(shapes[name]).numel() for name in read)
    assert round(held / 1e9, 1) == 79.7
    for wrong in (
        {**tensors, "model.layers.7.linear_attn.A_log": ((32,), None)},
        {name: t for name, t in tensors.items() if name != "model.layers.47.mlp.gate.weight"},
    ):
        with pytest.raises(CheckpointError, match=r"model\.layers\.(7|47)\."):
            build_target(Checkpoint(checkpoint.path, wrong), QWEN3_NEXT_80B, device="meta")
