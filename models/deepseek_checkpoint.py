"""The DeepSeek-V3 checkpoint layout: settings and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint
from specdec.models.decoder import DecoderParams, decoder_layout, load_decoder
from specdec.models.deepseek import DeepseekConfig, DeepseekLayer, DeepseekMoe, pack_layer
from specdec.models.mla import mla_layout
from specdec.models.moe import experts_layout, has_fused_experts, mlp_layout
from specdec.models.parts import part
from specdec.models.rope import read_rope, rope_settings

ONLY = {  # what a config may say about features that have one implementation here
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
MTP_LAYERS = 1  # of a config.json that does not say, as in transformers


def deepseek_config(config: Mapping[str, Any]) -> DeepseekConfig:
    """The fields of a Hugging Face config.json. Raises CheckpointError naming what is wrong."""

    def need(name: str) -> Any:
        if config.get(name) is None:
            raise CheckpointError(f"config.json lacks {name!r}")
        return config[name]

    for name, value in ONLY.items():
        if config.get(name, value) != value:
            raise CheckpointError(f"{name}={config[name]!r} is not supported; only {value!r} is")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # transformers writes head_dim = qk_rope_head_dim, which `read_rope` has no use for
    settings = DeepseekConfig(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        moe_intermediate_size=need("moe_intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_mtp_layers=_or(config.get("num_nextn_predict_layers"), MTP_LAYERS),
        num_heads=need("num_attention_heads"),
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=need("kv_lora_rank"),
        qk_nope_head_dim=need("qk_nope_head_dim"),
        qk_rope_head_dim=need("qk_rope_head_dim"),
        v_head_dim=need("v_head_dim"),
        num_experts=_or(config.get("n_routed_experts"), config.get("num_local_experts"), 0),
        num_shared_experts=config.get("n_shared_experts") or 0,
        top_k=_or(config.get("num_experts_per_tok"), 0),
        num_groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1,
        norm_topk_prob=bool(_or(config.get("norm_topk_prob"), True)),
        routed_scaling_factor=float(_or(config.get("routed_scaling_factor"), 1.0)),
        first_k_dense=_or(config.get("first_k_dense_replace"), 0),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=read_rope(config),
        rope_interleave=bool(_or(config.get("rope_interleave"), True)),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        max_position=config.get("max_position_embeddings", 4096),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
    )
    _check_routing(settings)
    return settings


def deepseek_config_json(config: DeepseekConfig) -> dict[str, Any]:
    """The config.json that `deepseek_config` reads back, in the published checkpoints' layout."""
    rope = rope_settings(config.rope)
    if config.mscale_all_dim and rope["rope_scaling"]:
        rope["rope_scaling"]["mscale_all_dim"] = config.mscale_all_dim
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **ONLY,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.num_shared_experts,
        "num_experts_per_tok": config.top_k,
        "n_group": config.num_groups,
        "topk_group": config.top_groups,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "first_k_dense_replace": config.first_k_dense,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_interleave": config.rope_interleave,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        **rope,
    }


def deepseek_layer_layout(
    config: DeepseekConfig, prefix: str, *, experts: bool, fused: bool, input_norm: bool = True
) -> DeepseekLayer:
    """Layout of one block with or without experts; `prefix` ends in a dot."""
    hidden, inner, mlp = config.hidden_size, config.moe_intermediate_size, f"{prefix}mlp."
    if experts:
        count, shared = config.num_experts, config.num_shared_experts * inner
        feed_forward = DeepseekMoe(
            gate=part(f"{mlp}gate.weight", count, hidden, dtype=torch.float32),
            correction=part(f"{mlp}gate.e_score_correction_bias", count, dtype=torch.float32),
            experts=experts_layout(f"{mlp}experts.", count, hidden, inner, fused=fused),
            shared=mlp_layout(f"{mlp}shared_experts.", hidden, shared) if shared else None,
        )
    else:
        feed_forward = mlp_layout(mlp, hidden, config.intermediate_size)
    return DeepseekLayer(
        input_norm=part(f"{prefix}input_layernorm.weight", hidden) if input_norm else None,
        attention=mla_layout(config, f"{prefix}self_attn."),
        post_norm=part(f"{prefix}post_attention_layernorm.weight", hidden),
        mlp=feed_forward,
    )


def deepseek_layout(config: DeepseekConfig, *, fused: bool = False) -> DecoderParams:
    """Layout of the model without its MTP layers; see `experts_layout` about `fused`."""
    stack = [
        deepseek_layer_layout(
            config, f"model.layers.{index}.", experts=config.has_experts(index), fused=fused
        )
        for index in range(config.num_layers)
    ]
    return decoder_layout(config, stack)


def mtp_names(checkpoint: Checkpoint, config: DeepseekConfig) -> list[str]:
    """The checkpoint's tensors of the MTP layers, which the model itself does not use."""
    first, count = config.num_layers, config.num_mtp_layers
    prefixes = tuple(f"model.layers.{index}." for index in range(first, first + count))
    return [name for name in checkpoint if name.startswith(prefixes)]


def load_deepseek_params(
    checkpoint: Checkpoint, config: DeepseekConfig, device: torch.device | str, dtype: torch.dtype
) -> DecoderParams:
    """Every parameter of a DeepSeek model, its layers packed; see `load_decoder`.

    Layers past the last one are left to the MTP head.
    """
    layout = deepseek_layout(config, fused=has_fused_experts(checkpoint))
    spare = mtp_names(checkpoint, config)
    return load_decoder(checkpoint, layout, device, dtype, pack_layer, spare)


def _check_routing(config: DeepseekConfig) -> None:
    if not any(config.has_experts(index) for index in range(config.num_layers)):
        return
    experts, groups = config.num_experts, config.num_groups
    if groups < 1 or experts % groups or not 1 <= config.top_groups <= groups:
        raise CheckpointError(
            f"n_routed_experts={experts}, n_group={groups} and topk_group={config.top_groups} "
            "do not fit; groups must be equal parts of the experts"
        )
    if config.top_groups < groups and experts // groups < 2:
        raise CheckpointError(
            f"n_group={groups} leaves fewer than 2 of {experts} experts a group, which are ranked "
            "by their two best"
        )
    if not 0 < config.top_k <= config.top_groups * (experts // groups):
        raise CheckpointError(
            f"num_experts_per_tok={config.top_k} is not within the experts of "
            f"topk_group={config.top_groups} groups"
        )


def _or(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
