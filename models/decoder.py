"""A decoder-only target made of one family's block: embed, blocks, norm, head.

What families share; a family's file holds its config, its parameters and its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models import layers
from specdec.models.batch import Batch, Cache, CacheShape, Target, TargetOutput
from specdec.models.capture import FinalNorm, check_layer_ids, run_stack
from specdec.models.checkpoint import Checkpoint
from specdec.models.layers import Product, add_rms_norm, linear
from specdec.models.paged import AttentionFn, PagedAttention, attention_rows
from specdec.models.parts import check_layout, part, read_layout
from specdec.models.quantize import settled
from specdec.models.rope import Rope, inv_freq


@dataclass(frozen=True)
class DecoderConfig:
    """What Llama-like families have in common."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # which the hidden size need not determine
    rms_norm_eps: float
    rope: Rope
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def rotary_dim(self) -> int:
        return self.head_dim


class Block(NamedTuple):
    """A family's decoder block for whoever stacks it, a target or a draft head.

    Configs have num_heads, num_kv_heads (of the cache), rotary_dim, attention_scale, rope and
    rms_norm_eps.
    """

    layer: Callable[..., tuple[Tensor | Product, Tensor]]
    # (layer, config, hidden [..., H], residual or None, rotation, attention) -> (hidden, residual);
    # hidden may be a product whose reader makes it
    attentions: Callable[[Any, Batch, Cache, torch.dtype], list[AttentionFn]]
    # (config, batch, cache, dtype) -> one function for each layer of the cache
    new_cache: Callable[[Any, int, torch.device | str, torch.dtype, CacheShape], Cache]
    # (config, number of layers, device, dtype, shape) -> zeroed pages
    pack: Callable[[Any], Any]  # a layer with its matrices packed for the CPU
    zero_centred: bool = False  # every norm multiplies by 1 + weight


class DecoderParams(NamedTuple):
    embed: Tensor  # [V, H]
    layers: tuple[Any, ...]
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]; the same tensor as `embed` when tied


def forward(
    block: Block,
    params: DecoderParams,
    config: Any,
    freq: Tensor,
    capture: tuple[int, ...],
    batch: Batch,
    cache: Cache,
) -> TargetOutput:
    """Runs a batch and writes its rows in the cache. `freq` is `inv_freq` of the config's rope."""
    hidden = F.embedding(batch.input_ids, params.embed)
    rotation = layers.rotary(freq, batch.positions, hidden.dtype, config.rope.attention_factor)
    attentions = block.attentions(config, batch, cache, hidden.dtype)
    blocks = [
        partial(block.layer, layer, config, rotation=rotation, attention=attention)
        for layer, attention in zip(params.layers, attentions, strict=True)
    ]
    return run_stack(blocks, hidden, capture, final_norm(block, config, params.norm))


def final_norm(block: Block, config: Any, weight: Tensor | None) -> FinalNorm:
    """The norm after a block's last layer: (hidden, residual or None) -> (normed, summed)."""
    eps, zero_centred = config.rms_norm_eps, block.zero_centred
    return partial(add_rms_norm, weight=weight, eps=eps, zero_centred=zero_centred)


def paged_attentions(
    config: Any, batch: Batch, cache: Cache, dtype: torch.dtype
) -> list[AttentionFn]:
    """Attention over paged keys and values, for each layer of the cache."""
    rows = attention_rows(batch, config.num_heads, config.num_kv_heads, dtype)
    return [
        PagedAttention(keys, values, batch.slot_mapping, rows, config.attention_scale)
        for keys, values in zip(cache.keys, cache.values, strict=True)
    ]


def new_cache(
    config: Any,
    num_layers: int,
    device: torch.device | str,
    dtype: torch.dtype,
    shape: CacheShape,
) -> Cache:
    """Zeroed pages of keys and values; what a mask hides must still be finite."""
    pages = (shape.num_blocks, shape.block_size, config.num_kv_heads, config.head_dim)
    keys, values = (
        tuple(torch.zeros(pages, device=device, dtype=dtype) for _ in range(num_layers))
        for _ in range(2)
    )
    return Cache(keys, values)


def decoder_target(
    block: Block, params: DecoderParams, config: Any, vocab_size: int | None = None
) -> Target:
    """Binds parameters to the functions of a target.

    Args:
        params: tensors on one device. On a CPU the products use packed copies of the matrices (a
            layer that is packed already is taken as it is); of the plain ones only `embed` and
            `lm_head` are kept.
        vocab_size: real ids, when the matrices are padded past them.
    """
    embed, lm_head = params.embed, params.lm_head
    params = params._replace(
        layers=tuple(block.pack(layer) for layer in params.layers), lm_head=layers.pack(lm_head)
    )
    freq = inv_freq(config.rope, config.rotary_dim, embed.device)
    make_cache = partial(block.new_cache, config, len(params.layers), embed.device, embed.dtype)

    def logits(hidden: Tensor) -> Tensor:
        return linear(hidden, params.lm_head)

    def capture(ids: tuple[int, ...]) -> Target:
        ids = check_layer_ids(ids, len(params.layers))
        return Target(
            config=config,
            params=params,
            forward=torch.no_grad()(partial(forward, block, params, config, freq, ids)),
            logits=torch.no_grad()(logits),
            new_cache=make_cache,
            vocab_size=vocab_size or min(config.vocab_size, lm_head.shape[0]),
            max_position=config.max_position,
            embed=embed,
            lm_head=lm_head,
            capture=capture,
        )

    return capture(())


def decoder_layout(config: Any, layer_layouts: Iterable[Any]) -> DecoderParams:
    """Layout of a whole model around its layers'; `lm_head` is None when the tables are tied."""
    table = (config.vocab_size, config.hidden_size)
    return DecoderParams(
        embed=part("model.embed_tokens.weight", *table),
        layers=tuple(layer_layouts),
        norm=part("model.norm.weight", config.hidden_size),
        lm_head=None if config.tie_word_embeddings else part("lm_head.weight", *table),
    )


def load_decoder(
    checkpoint: Checkpoint,
    layout: DecoderParams,
    device: torch.device | str,
    dtype: torch.dtype,
    prepare: Callable[[Any], Any] = lambda layer: layer,
    redundant: Iterable[str] = (),
) -> DecoderParams:
    """Reads a model layer by layer; see `check_names` for the errors.

    Args:
        prepare: applied to each layer before the next is read (`Block.pack`), so that plain and
            packed matrices of the whole model never exist together.
        redundant: names that may be present without use.
    """
    tied = layout.lm_head is None
    check_layout(checkpoint, layout, [*redundant, *["lm_head.weight"] * tied])

    def read(part: Any) -> Any:
        return read_layout(checkpoint, part, device, dtype)

    embed = settled(read(layout.embed), dtype)
    return DecoderParams(
        embed=embed,
        layers=tuple(settled(prepare(read(layer)), dtype) for layer in layout.layers),
        norm=settled(read(layout.norm), dtype),
        lm_head=embed if tied else settled(read(layout.lm_head), dtype),
    )
