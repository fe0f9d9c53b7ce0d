"""The Llama family: its config, its block, its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdec.models.batch import Target
from specdec.models.decoder import (
    AttentionFn,
    Block,
    DecoderConfig,
    DecoderParams,
    decoder_target,
    new_cache,
    paged_attentions,
)
from specdec.models.layers import Product, Rotary, add_rms_norm, gated_part, linear, pack, product
from specdec.models.paged import rotate_and_attend


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    mlp_bias: bool


class LlamaLayer(NamedTuple):
    """One block. I: intermediate size."""

    input_norm: Tensor | None  # [H]; None: the block takes its input as it is
    qkv: Tensor  # [(Hq + 2 Hkv) * D, H]
    qkv_bias: Tensor | None
    out: Tensor  # [H, Hq * D]
    out_bias: Tensor | None
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    gate_up_bias: Tensor | None
    down: Tensor  # [H, I]
    down_bias: Tensor | None


def llama_layer(
    layer: LlamaLayer,
    config: LlamaConfig,
    hidden: Tensor | Product,
    residual: Tensor | None,
    rotation: Rotary,
    attention: AttentionFn,
    attention_input: Tensor | None = None,
) -> tuple[Tensor | Product, Tensor]:
    """One pre-norm block over [..., H]; the block's output is hidden + residual.

    `residual` is None before the first block. With `input_norm` None the block's input is used
    un-normed (Eagle's first layer). `attention_input` replaces what feeds q, k and v, at whatever
    width the layer's are (Eagle-3's first layer).
    """
    eps = config.rms_norm_eps
    normed, residual = add_rms_norm(hidden, residual, layer.input_norm, eps, reader=layer.qkv)
    if attention_input is not None:
        normed = attention_input
    qkv = linear(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
    out = rotate_and_attend(attention, qkv, rotation, config.num_heads)
    out = product(out.flatten(-2), layer.out, layer.out_bias)
    normed, residual = add_rms_norm(
        out, residual, layer.post_norm, eps, reader=layer.gate_up, gated=True
    )
    inner = gated_part(normed, layer.gate_up, layer.gate_up_bias)
    return product(inner, layer.down, layer.down_bias), residual


def pack_layer(layer: LlamaLayer) -> LlamaLayer:
    """The block with its matrices packed for the CPU."""
    return layer._replace(
        qkv=pack(layer.qkv),
        out=pack(layer.out),
        gate_up=pack(layer.gate_up),
        down=pack(layer.down),
    )


LLAMA = Block(llama_layer, paged_attentions, new_cache, pack_layer)


def llama_target(
    params: DecoderParams, config: LlamaConfig, vocab_size: int | None = None
) -> Target:
    """See `decoder_target`."""
    return decoder_target(LLAMA, params, config, vocab_size)
