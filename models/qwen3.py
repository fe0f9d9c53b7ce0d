"""Qwen3: a Llama-like block with a norm on every query and key head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from specdec.kernels.cache_write.reference import HeadNorms
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
from specdec.models.layers import Rotary, add_rms_norm, linear, pack
from specdec.models.moe import Mlp, mlp, pack_mlp
from specdec.models.paged import rotate_and_attend


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    pass


class Qwen3Layer(NamedTuple):
    """One block. D: head dimension, which the hidden size does not determine."""

    input_norm: Tensor | None  # [H]; None: the block takes its input as it is
    qkv: Tensor  # [(Hq + 2 Hkv) * D, H]
    qkv_bias: Tensor | None
    q_norm: Tensor  # [D], shared by the heads
    k_norm: Tensor  # [D]
    out: Tensor  # [H, Hq * D]
    out_bias: Tensor | None
    post_norm: Tensor  # [H]
    mlp: Any  # Mlp here; another family's feed-forward part elsewhere


def qwen3_layer(
    layer: Qwen3Layer,
    config: Qwen3Config,
    hidden: Tensor,
    residual: Tensor | None,
    rotation: Rotary,
    attention: AttentionFn,
    attention_input: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One pre-norm block over [..., H]; the block's output is hidden + residual.

    `residual` is None before the first block. `attention_input` replaces what feeds q, k and v, at
    whatever width the layer's are (Eagle-3's first layer, which has no `input_norm`).
    """
    return qwen3_block(layer, config, hidden, residual, rotation, attention, mlp, attention_input)


def qwen3_block(
    layer: Qwen3Layer,
    config: Any,
    hidden: Tensor,
    residual: Tensor | None,
    rotation: Rotary,
    attention: AttentionFn,
    feed_forward: Callable[[Any, Tensor], Tensor],
    attention_input: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`qwen3_layer` with the feed-forward part as an argument: (layer.mlp, [..., H]) -> [..., H]"""
    hidden, residual = add_rms_norm(hidden, residual, layer.input_norm, config.rms_norm_eps)
    if attention_input is not None:
        hidden = attention_input
    qkv = linear(hidden, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
    norms = HeadNorms(layer.q_norm, layer.k_norm, config.rms_norm_eps)
    out = rotate_and_attend(attention, qkv, rotation, config.num_heads, norms)
    out = linear(out.flatten(-2), layer.out, layer.out_bias)
    hidden, residual = add_rms_norm(out, residual, layer.post_norm, config.rms_norm_eps)
    return feed_forward(layer.mlp, hidden), residual


def pack_layer(layer: Qwen3Layer) -> Qwen3Layer:
    """The block with its matrices packed for the CPU; experts stay as they are."""
    feed_forward = pack_mlp(layer.mlp) if isinstance(layer.mlp, Mlp) else layer.mlp
    return layer._replace(qkv=pack(layer.qkv), out=pack(layer.out), mlp=feed_forward)


QWEN3 = Block(qwen3_layer, paged_attentions, new_cache, pack_layer)


def qwen3_target(
    params: DecoderParams, config: Qwen3Config, vocab_size: int | None = None
) -> Target:
    """See `decoder_target`."""
    return decoder_target(QWEN3, params, config, vocab_size)
