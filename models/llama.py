"""The Llama family as pure functions over an explicit tree of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models import layers
from specdec.models.batch import Batch, Cache, CacheShape, Target, TargetOutput
from specdec.models.capture import check_layer_ids, run_stack
from specdec.models.layers import Rotary, linear, rms_norm
from specdec.models.rope import Rope, inv_freq

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
# (query [..., Hq, D], key [..., Hkv, D], value [..., Hkv, D]) -> [..., Hq, D]


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def rotary_dim(self) -> int:
        return self.head_dim


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


class LlamaParams(NamedTuple):
    embed: Tensor  # [V, H]
    layers: tuple[LlamaLayer, ...]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]; the same tensor as `embed` when tied


def llama_layer(
    layer: LlamaLayer,
    config: LlamaConfig,
    hidden: Tensor,
    residual: Tensor | None,
    rotation: Rotary,
    attention: AttentionFn,
    attention_input: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One pre-norm block over [..., H]; the block's output is hidden + residual.

    `residual` is None before the first block. With `input_norm` None the block's input is used
    un-normed (Eagle's first layer). `attention_input` replaces what feeds q, k and v, at whatever
    width the layer's are (Eagle-3's first layer).
    """
    residual = hidden if residual is None else hidden + residual
    hidden = residual if attention_input is None else attention_input
    if layer.input_norm is not None:
        hidden = rms_norm(residual, layer.input_norm, config.rms_norm_eps)
    num_rotated = config.num_heads + config.num_kv_heads
    qkv = linear(hidden, layer.qkv, layer.qkv_bias)
    qkv = qkv.unflatten(-1, (num_rotated + config.num_kv_heads, config.head_dim))
    rotated = layers.rotate(qkv[..., :num_rotated, :], rotation)
    query, key = rotated[..., : config.num_heads, :], rotated[..., config.num_heads :, :]
    out = attention(query, key, qkv[..., num_rotated:, :]).flatten(-2)
    residual = residual + linear(out, layer.out, layer.out_bias)
    hidden = rms_norm(residual, layer.post_norm, config.rms_norm_eps)
    hidden = layers.swiglu(linear(hidden, layer.gate_up, layer.gate_up_bias))
    return linear(hidden, layer.down, layer.down_bias), residual


def paged_layers(
    stack: tuple[LlamaLayer, ...],
    config: LlamaConfig,
    hidden: Tensor,
    freq: Tensor,
    batch: Batch,
    cache: Cache,
    capture: Sequence[int] = (),
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A stack of blocks over a paged batch, as `run_stack`: [T, H] -> [T, H] and streams."""
    rotation = layers.rotary(freq, batch.positions, hidden.dtype, config.rope.attention_factor)
    groups = layers.attention_groups(batch, config.num_heads, config.num_kv_heads, hidden.dtype)
    blocks = []
    for layer, keys, values in zip(stack, cache.keys, cache.values, strict=True):
        attention = partial(
            layers.attend,
            slot_mapping=batch.slot_mapping,
            groups=groups,
            key_cache=keys,
            value_cache=values,
            scale=config.attention_scale,
        )
        blocks.append(partial(llama_layer, layer, config, rotation=rotation, attention=attention))
    return run_stack(blocks, hidden, capture)


def forward(
    params: LlamaParams,
    config: LlamaConfig,
    freq: Tensor,
    capture: tuple[int, ...],
    batch: Batch,
    cache: Cache,
) -> TargetOutput:
    """Runs a batch and writes its keys and values. `freq` is `inv_freq` of the config's rope."""
    hidden = F.embedding(batch.input_ids, params.embed)
    hidden, aux = paged_layers(params.layers, config, hidden, freq, batch, cache, capture)
    return TargetOutput(rms_norm(hidden, params.norm, config.rms_norm_eps), aux)


def new_cache(
    config: LlamaConfig,
    num_layers: int,
    device: torch.device | str,
    dtype: torch.dtype,
    shape: CacheShape,
) -> Cache:
    """Zeroed pages; what a mask hides must still be finite."""
    pages = (shape.num_blocks, shape.block_size, config.num_kv_heads, config.head_dim)
    return Cache(
        *(
            tuple(torch.zeros(pages, device=device, dtype=dtype) for _ in range(num_layers))
            for _ in range(2)
        )
    )


def llama_target(params: LlamaParams, config: LlamaConfig, vocab_size: int | None = None) -> Target:
    """Binds parameters to the functions of a target.

    Args:
        params: plain tensors on one device. On a CPU the products use packed copies of the
            matrices; of the plain ones only `embed` and `lm_head` are kept.
        vocab_size: real ids, when the matrices are padded past them.
    """
    embed, lm_head = params.embed, params.lm_head
    params = params._replace(
        layers=tuple(pack_layer(layer) for layer in params.layers), lm_head=layers.pack(lm_head)
    )
    freq = inv_freq(config.rope, config.head_dim, embed.device)

    def logits(hidden: Tensor) -> Tensor:
        return linear(hidden, params.lm_head)

    def capture(ids: tuple[int, ...]) -> Target:
        ids = check_layer_ids(ids, config.num_layers)
        return Target(
            config=config,
            params=params,
            forward=torch.no_grad()(partial(forward, params, config, freq, ids)),
            logits=torch.no_grad()(logits),
            new_cache=partial(new_cache, config, config.num_layers, embed.device, embed.dtype),
            vocab_size=vocab_size or min(config.vocab_size, lm_head.shape[0]),
            max_position=config.max_position,
            embed=embed,
            lm_head=lm_head,
            capture=capture,
        )

    return capture(())


def pack_layer(layer: LlamaLayer) -> LlamaLayer:
    """The block with its matrices packed for the CPU."""
    return layer._replace(
        qkv=layers.pack(layer.qkv),
        out=layers.pack(layer.out),
        gate_up=layers.pack(layer.gate_up),
        down=layers.pack(layer.down),
    )
