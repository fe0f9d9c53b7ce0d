"""Qwen3-MoE: Qwen3's attention with experts in most blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from specdec.models.batch import Target
from specdec.models.decoder import (
    AttentionFn,
    Block,
    DecoderParams,
    decoder_target,
    new_cache,
    paged_attentions,
)
from specdec.models.layers import Normed, Product, Rotary
from specdec.models.moe import Mlp, ObserveFn, SoftmaxMoe, mlp_product, softmax_moe
from specdec.models.qwen3 import Qwen3Config, Qwen3Layer, pack_layer, qwen3_block


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """`intermediate_size` is the dense blocks', `moe_intermediate_size` an expert's."""

    moe_intermediate_size: int
    num_experts: int
    top_k: int  # experts a row goes to
    norm_topk_prob: bool  # the chosen experts' weights sum to one
    decoder_sparse_step: int  # every so many blocks have experts
    mlp_only_layers: tuple[int, ...]  # blocks without experts all the same

    def has_experts(self, index: int) -> bool:
        """Whether block `index` has experts; False where there is a dense part."""
        if self.num_experts == 0 or index in self.mlp_only_layers:
            return False
        return (index + 1) % self.decoder_sparse_step == 0


def qwen3_moe_layer(
    layer: Qwen3Layer,
    config: Qwen3MoeConfig,
    hidden: Tensor | Product,
    residual: Tensor | None,
    rotation: Rotary,
    attention: AttentionFn,
    observe: ObserveFn | None = None,
) -> tuple[Tensor | Product, Tensor]:
    """As `qwen3_layer`; the layer's `mlp` is dense or has experts, whose routing `observe` sees."""
    feed_forward = partial(_feed_forward, config, observe)
    return qwen3_block(layer, config, hidden, residual, rotation, attention, feed_forward)


def _feed_forward(
    config: Qwen3MoeConfig,
    observe: ObserveFn | None,
    params: Mlp | SoftmaxMoe,
    hidden: Tensor | Normed,
) -> Tensor | Product:
    if isinstance(params, Mlp):
        return mlp_product(params, hidden)
    return softmax_moe(
        params,
        hidden,
        top_k=config.top_k,
        normalise=config.norm_topk_prob,
        observe=observe,
    )


QWEN3_MOE = Block(qwen3_moe_layer, paged_attentions, new_cache, pack_layer)


def qwen3_moe_target(
    params: DecoderParams, config: Qwen3MoeConfig, vocab_size: int | None = None
) -> Target:
    """See `decoder_target`."""
    return decoder_target(QWEN3_MOE, params, config, vocab_size)
