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
from specdec.models.layers import Normed, Product, Rotary, add_rms_norm, linear, pack, product
from specdec.models.moe import Mlp, mlp_product, pack_mlp
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
    hidden: Tensor | Product,
    residual: Tensor | None,
    rotation: Rotary,
    attention: AttentionFn,
    attention_input: Tensor | None = None,
) -> tuple[Tensor | Product, Tensor]:
    """One pre-norm block over [..., H]; the block's output is hidden + residual.

    `residual` is None before the first block. `attention_input` replaces what feeds q, k and v, at
    whatever width the layer's are (Eagle-3's first layer, which has no `input_norm`).
    """
    return qwen3_block(
        layer, config, hidden, residual, rotation, attention, mlp_product, attention_input
    )


def qwen3_block(
    layer: Qwen3Layer,
    config: Any,
    hidden: Tensor | Product,
    residual: Tensor | None,
    rotation: Rotary,
    attention: AttentionFn,
    feed_forward: Callable[[Any, Tensor | Normed], Tensor | Product],
    attention_input: Tensor | None = None,
) -> tuple[Tensor | Product, Tensor]:
    """`qwen3_layer` with the feed-forward part as an argument: (layer.mlp, [..., H]) -> [..., H].

    What it is given is a tensor, or with an `Mlp` perhaps a `Normed`.
    """
    eps = config.rms_norm_eps
    normed, residual = add_rms_norm(hidden, residual, layer.input_norm, eps, reader=layer.qkv)
    if attention_input is not None:
        normed = attention_input
    qkv = linear(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
    norms = HeadNorms(layer.q_norm, layer.k_norm, eps)
    out = rotate_and_attend(attention, qkv, rotation, config.num_heads, norms)
    out = product(out.flatten(-2), layer.out, layer.out_bias)
    reader = layer.mlp.gate_up if isinstance(layer.mlp, Mlp) else None
    normed, residual = add_rms_norm(out, residual, layer.post_norm, eps, reader=reader, gated=True)
    return feed_forward(layer.mlp, normed), residual


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
