"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and experts chosen by group-limited sigmoid
scores beside shared ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdec.models.batch import Target
from specdec.models.decoder import AttentionFn, Block, DecoderParams, decoder_target
from specdec.models.layers import Rotary, add_rms_norm
from specdec.models.mla import (
    Mla,
    latent_attention,
    latent_attentions,
    new_latent_cache,
    pack_mla,
)
from specdec.models.moe import (
    Experts,
    Mlp,
    ObserveFn,
    grouped_sigmoid_routing,
    mlp,
    pack_mlp,
    run_experts,
)
from specdec.models.rope import Rope


@dataclass(frozen=True)
class DeepseekConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense blocks
    moe_intermediate_size: int  # of one expert
    num_layers: int  # without the MTP layers
    num_mtp_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_shared_experts: int
    top_k: int
    num_groups: int
    top_groups: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense: int  # blocks before the first with experts
    rms_norm_eps: float
    rope: Rope
    rope_interleave: bool
    mscale_all_dim: float  # 0: scaled positions leave the attention's scale alone
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache: one latent a token."""
        return 1

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if self.mscale_all_dim and self.rope.kind != "default" and self.rope.factor > 1:
            scale *= (0.1 * self.mscale_all_dim * math.log(self.rope.factor) + 1.0) ** 2
        return scale

    def has_experts(self, index: int) -> bool:
        """Whether block `index` has experts; MTP blocks are numbered on from the last one."""
        return index >= self.first_k_dense


class DeepseekMoe(NamedTuple):
    gate: Tensor  # [E, H] fp32
    correction: Tensor  # [E] fp32, added to the scores that choose
    experts: Experts
    shared: Mlp | None  # all shared experts as one part


class DeepseekLayer(NamedTuple):
    input_norm: Tensor | None  # [H]; None: the block takes its input as it is
    attention: Mla
    post_norm: Tensor  # [H]
    mlp: Mlp | DeepseekMoe


def deepseek_layer(
    layer: DeepseekLayer,
    config: DeepseekConfig,
    hidden: Tensor,
    residual: Tensor | None,
    rotation: Rotary,
    attention: AttentionFn,
    observe: ObserveFn | None = None,
) -> tuple[Tensor, Tensor]:
    """One pre-norm block over [..., H]; the block's output is hidden + residual.

    `residual` is None before the first block. For `attention` see `latent_attention`; `observe`
    sees the routing of a block with experts.
    """
    hidden, residual = add_rms_norm(hidden, residual, layer.input_norm, config.rms_norm_eps)
    out = latent_attention(layer.attention, config, hidden, rotation, attention)
    hidden, residual = add_rms_norm(out, residual, layer.post_norm, config.rms_norm_eps)
    if isinstance(layer.mlp, Mlp):
        return mlp(layer.mlp, hidden), residual
    return deepseek_moe(layer.mlp, config, hidden, observe), residual


def deepseek_moe(
    params: DeepseekMoe,
    config: DeepseekConfig,
    hidden: Tensor,
    observe: ObserveFn | None = None,
) -> Tensor:
    """Chosen and shared experts of [..., H] -> [..., H]."""
    rows = hidden.flatten(0, -2)
    routing = grouped_sigmoid_routing(
        rows,
        params.gate,
        params.correction,
        top_k=config.top_k,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    if observe is not None:
        observe(routing)
    shared = None if params.shared is None else mlp(params.shared, rows)
    return run_experts(params.experts, rows, routing, shared).view(hidden.shape)


def pack_layer(layer: DeepseekLayer) -> DeepseekLayer:
    """The block with its matrices packed for the CPU; routed experts stay as they are."""
    feed_forward = layer.mlp
    if isinstance(feed_forward, Mlp):
        feed_forward = pack_mlp(feed_forward)
    elif feed_forward.shared is not None:
        feed_forward = feed_forward._replace(shared=pack_mlp(feed_forward.shared))
    return layer._replace(attention=pack_mla(layer.attention), mlp=feed_forward)


DEEPSEEK = Block(deepseek_layer, latent_attentions, new_latent_cache, pack_layer)


def deepseek_target(
    params: DecoderParams, config: DeepseekConfig, vocab_size: int | None = None
) -> Target:
    """See `decoder_target`."""
    return decoder_target(DEEPSEEK, params, config, vocab_size)
