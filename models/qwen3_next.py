"""Qwen3-Next: gated DeltaNet layers, gated full attention, experts beside a shared one.

Qwen3.5's dense models are the same block with a plain feed-forward part. Every norm is zero-centred
but DeltaNet's gated one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.models import delta_windows, deltanet, layers
from specdec.models.batch import Batch, CacheShape, Target
from specdec.models.decoder import (
    AttentionFn,
    Block,
    DecoderParams,
    decoder_target,
    paged_attentions,
)
from specdec.models.decoder import new_cache as new_paged_cache
from specdec.models.deltanet import DeltaNet, DeltaNetConfig, RecurrenceFn, delta_mixer
from specdec.models.layers import Rotary, add_rms_norm, linear, pack, rms_norm
from specdec.models.moe import Experts, Mlp, ObserveFn, mlp, pack_mlp, run_experts, softmax_routing
from specdec.models.rope import Rope


@dataclass(frozen=True)
class Qwen3NextConfig:
    vocab_size: int
    hidden_size: int
    is_attention: tuple[bool, ...]  # of each layer; the others are DeltaNet
    is_moe: tuple[bool, ...]  # of each layer; the others are dense
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # the first dimensions of a head are rotated, the others are not
    rms_norm_eps: float
    rope: Rope
    max_position: int
    tie_word_embeddings: bool
    delta: DeltaNetConfig
    split_projections: bool  # Qwen3.5's checkpoint layout of the DeltaNet projections
    intermediate_size: int  # of dense layers
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    normalise_weights: bool

    @property
    def num_layers(self) -> int:
        return len(self.is_attention)

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5


class GatedAttention(NamedTuple):
    """Full attention whose output is gated by sigmoid, one gate a dimension of each head."""

    in_proj: Tensor  # [(2 Hq + 2 Hkv) * D, H] rows: query, key, value heads, then gates
    q_norm: Tensor  # [D], zero-centred
    k_norm: Tensor  # [D]
    out: Tensor  # [H, Hq * D]


class SharedExpertMoe(NamedTuple):
    """Experts chosen by softmax, beside one that every token passes through."""

    gate: Tensor  # [E, H]
    experts: Experts
    shared: Mlp
    shared_gate: Tensor  # [1, H]


class Qwen3NextLayer(NamedTuple):
    input_norm: Tensor | None  # [H]; None: the block takes its input as it is
    mixer: DeltaNet | GatedAttention
    post_norm: Tensor  # [H]
    mlp: SharedExpertMoe | Mlp


class RecurrentCache(NamedTuple):
    """Pages of the attention layers, and of each slot what the DeltaNet layers keep.

    Layer i's entry of `states` or `stored` is after the tokens before `window_start`, as
    `delta_windows.run_group` leaves it. A slot starts anew at position 0, so there is no way to
    start one elsewhere: cached prefixes do not serve these models. Padding requests need a slot of
    their own.
    """

    keys: tuple[Tensor, ...]  # each [num_blocks, block_size, Hkv, D]
    values: tuple[Tensor, ...]
    states: tuple[Tensor, ...]  # each [S, Hv, Dk, Dv] fp32
    stored: tuple[Tensor, ...]  # each [S, W - 1 + window - 1, n] inputs
    window_start: Tensor  # [S] int64 position of the first stored row


add_zero_centred_norm = partial(add_rms_norm, zero_centred=True)
zero_centred_norm = partial(rms_norm, zero_centred=True)


def qwen3_next_layer(
    layer: Qwen3NextLayer,
    config: Qwen3NextConfig,
    hidden: Tensor,
    residual: Tensor | None,
    rotation: Rotary,
    attention: AttentionFn | RecurrenceFn,
    observe: ObserveFn | None = None,
) -> tuple[Tensor, Tensor]:
    """One pre-norm block over [..., H]; the block's output is hidden + residual.

    Args:
        residual: None before the first block.
        attention: for a DeltaNet layer, its recurrence.
        observe: sees the routing of a layer with experts.
    """
    eps = config.rms_norm_eps
    hidden, residual = add_zero_centred_norm(hidden, residual, layer.input_norm, eps)
    if isinstance(layer.mixer, DeltaNet):
        hidden = delta_mixer(layer.mixer, config.delta, hidden, attention)
    else:
        hidden = gated_attention(layer.mixer, config, hidden, rotation, attention)
    hidden, residual = add_zero_centred_norm(hidden, residual, layer.post_norm, eps)
    if isinstance(layer.mlp, Mlp):
        return mlp(layer.mlp, hidden), residual
    return shared_expert_moe(layer.mlp, config, hidden, observe), residual


def gated_attention(
    mixer: GatedAttention,
    config: Qwen3NextConfig,
    hidden: Tensor,
    rotation: Rotary,
    attention: AttentionFn,
) -> Tensor:
    """[..., H] -> [..., H] with the attention as an argument."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    rows = linear(hidden, mixer.in_proj).unflatten(-1, (-1, config.head_dim))
    query, key, value, gate = rows.split((heads, kv_heads, kv_heads, heads), dim=-2)
    query = rotate_first(zero_centred_norm(query, mixer.q_norm, config.rms_norm_eps), rotation)
    key = rotate_first(zero_centred_norm(key, mixer.k_norm, config.rms_norm_eps), rotation)
    out = attention(query, key, value) * gate.sigmoid()
    return linear(out.flatten(-2), mixer.out)


def rotate_first(x: Tensor, rotation: Rotary) -> Tensor:
    """Rotates the first dimensions of heads [..., heads, D], as many as the rotation has."""
    width = rotation.cos.shape[-1]
    rotated = layers.rotate(x[..., :width], rotation)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


def shared_expert_moe(
    params: SharedExpertMoe,
    config: Qwen3NextConfig,
    hidden: Tensor,
    observe: ObserveFn | None = None,
) -> Tensor:
    """[..., H] -> [..., H]."""
    rows = hidden.flatten(0, -2)
    routing = softmax_routing(
        rows, params.gate, top_k=config.experts_per_token, normalise=config.normalise_weights
    )
    if observe is not None:
        observe(routing)
    shared, gate = mlp(params.shared, rows), linear(rows, params.shared_gate)
    return run_experts(params.experts, rows, routing, shared, gate).view(hidden.shape)


def mixings(
    config: Qwen3NextConfig, batch: Batch, cache: RecurrentCache, dtype: torch.dtype
) -> list[AttentionFn | RecurrenceFn]:
    """Attention or recurrence of each layer over a batch; the slots' windows move on now."""
    if not cache.stored:
        return paged_attentions(config, batch, cache, dtype)
    window = cache.stored[0].shape[1] - (config.delta.conv_width - 1) + 1
    rows = delta_windows.begin_step_(config.delta, batch, cache.window_start, window)
    attentions = iter(paged_attentions(config, batch, cache, dtype))
    slots = iter(zip(cache.states, cache.stored, strict=True))
    return [
        next(attentions)
        if is_attention
        else partial(delta_windows.recur_, config.delta, rows, *next(slots))
        for is_attention in config.is_attention
    ]


def new_cache(
    config: Qwen3NextConfig,
    num_layers: int,
    device: torch.device | str,
    dtype: torch.dtype,
    shape: CacheShape,
) -> RecurrentCache:
    """Zeroed pages for the attention layers, states and windows for the others."""
    num_attention = sum(config.is_attention[:num_layers])
    paged = new_paged_cache(config, num_attention, device, dtype, shape)
    slots, recurrent = shape.num_slots, range(num_layers - num_attention)
    return RecurrentCache(
        keys=paged.keys,
        values=paged.values,
        states=tuple(deltanet.new_states(config.delta, slots, device) for _ in recurrent),
        stored=tuple(
            delta_windows.new_inputs(config.delta, slots, shape.window, device, dtype)
            for _ in recurrent
        ),
        window_start=torch.zeros(slots, dtype=torch.int64, device=device),
    )


class RollbackMemory(NamedTuple):
    """Bytes of the DeltaNet layers' caches."""

    committed: int  # one state a slot, and what its convolution sees: needed without drafts too
    window: int  # inputs of the rows that may be rejected: what exact rollback adds
    snapshots: int  # what a copy of the committed part for each draft position would add instead


def rollback_memory(
    config: Qwen3NextConfig, num_slots: int, num_draft_tokens: int, dtype: torch.dtype
) -> RollbackMemory:
    """What rollback costs, from the shapes of the caches; nothing is allocated.

    Qwen3-Next-80B-A3B in bf16 with 64 requests and K = 3: committed 4.95 GB, window 0.114 GB,
    snapshots 14.8 GB.
    """

    def size(window: int) -> int:
        shape = CacheShape(num_blocks=1, block_size=1, num_slots=num_slots, window=window)
        cache = new_cache(config, config.num_layers, "meta", dtype, shape)
        tensors = (*cache.states, *cache.stored)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    committed = size(1)
    return RollbackMemory(
        committed=committed,
        window=size(num_draft_tokens + 1) - committed,
        snapshots=num_draft_tokens * committed,
    )


def pack_layer(layer: Qwen3NextLayer) -> Qwen3NextLayer:
    """The block with its matrices packed for the CPU; experts stay as they are."""
    mixer, feed_forward = layer.mixer, layer.mlp
    if isinstance(mixer, DeltaNet):
        mixer = deltanet.pack_mixer(mixer)
    else:
        mixer = mixer._replace(in_proj=pack(mixer.in_proj), out=pack(mixer.out))
    if isinstance(feed_forward, Mlp):
        feed_forward = pack_mlp(feed_forward)
    else:
        feed_forward = feed_forward._replace(shared=pack_mlp(feed_forward.shared))
    return layer._replace(mixer=mixer, mlp=feed_forward)


QWEN3_NEXT = Block(qwen3_next_layer, mixings, new_cache, pack_layer, zero_centred=True)

# the block of an MTP head: full attention in every layer
QWEN3_NEXT_ATTENTION = QWEN3_NEXT._replace(attentions=paged_attentions, new_cache=new_paged_cache)


def qwen3_next_target(
    params: DecoderParams, config: Qwen3NextConfig, vocab_size: int | None = None
) -> Target:
    """See `decoder_target`."""
    return decoder_target(QWEN3_NEXT, params, config, vocab_size)
