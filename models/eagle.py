"""Draft heads: embed, (norm), fuse, block(s), logits, as a row of `HeadAxes` says.

The defaults of the row are Eagle for Llama (arXiv 2401.15077, in the layout of
yuhuili/EAGLE-LLaMA3.1-Instruct-8B): fc(cat(embed, hidden)), a block without an input norm, no final
norm, and its output both as the logits' input and as the next step's hidden. Eagle-3 and the
multi-token prediction heads are other rows of the same moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models import layers
from specdec.models.axes import HeadAxes
from specdec.models.batch import (
    Batch,
    CacheShape,
    Draft,
    DraftOutput,
    HeadCache,
    Target,
    TargetOutput,
    VocabMap,
)
from specdec.models.blocks import BLOCKS
from specdec.models.decoder import final_norm
from specdec.models.head import EagleConfig, EagleHead, init_head, owned
from specdec.models.layers import linear
from specdec.models.paged import AttentionFn
from specdec.models.rope import inv_freq

__all__ = [
    "EagleConfig",
    "EagleHead",
    "combine_aux",
    "eagle_block",
    "eagle_draft",
    "fuse",
    "init_head",
    "layer_indices",
    "make_vocab_map",
]

HeadAttentionFn = Callable[..., Tensor] | Sequence[AttentionFn]
# (query [..., Hq, D], key [..., Hkv, D], value [..., Hkv, D], layer) -> [..., Hq, D], or one
# function without the last argument a layer


def combine_aux(head: EagleHead, config: EagleConfig, aux: Sequence[Tensor]) -> Tensor:
    """Eagle-3's features: fc(cat(streams)) of A auxiliary streams [..., H_target] -> [..., H]."""
    axes, eps = config.axes, config.block.rms_norm_eps
    norm = partial(layers.rms_norm, zero_centred=BLOCKS[axes.block].block.zero_centred)
    if axes.aux_norm == "each":
        aux = [norm(stream, weight, eps) for stream, weight in zip(aux, head.aux_norm, strict=True)]
    joined = torch.cat(tuple(aux), dim=-1)
    if axes.aux_norm == "joint":
        joined = norm(joined, head.aux_norm, eps)
    return linear(joined, head.aux_fc)


def fuse(
    head: EagleHead,
    config: EagleConfig,
    embeds: Tensor,
    hidden: Tensor,
    positions: Tensor,
    layer: int = 0,
) -> Tensor:
    """[..., H] next-token embeddings and [..., H] hidden states to the first block's input.

    That is [..., H], or with fusion wide [..., 2 H] for its q, k and v. `layer` picks the
    parameters where each layer has its own.
    """
    axes, eps = config.axes, config.block.rms_norm_eps
    if axes.position0_embedding == "zeroed":
        embeds = embeds.masked_fill((positions == 0).unsqueeze(-1), 0)
    if axes.fusion == "cat":
        joined = torch.cat((embeds, hidden), dim=-1)
    else:
        joined = layers.norm_pair(
            embeds,
            hidden,
            owned(head.embed_norm, layer),
            owned(head.hidden_norm, layer),
            eps,
            zero_centred=BLOCKS[axes.block].block.zero_centred,
        )
    if axes.fusion == "wide":
        return joined
    return linear(joined, owned(head.fc, layer), owned(head.fc_bias, layer))


def eagle_block(
    head: EagleHead,
    config: EagleConfig,
    embeds: Tensor,
    hidden: Tensor,
    positions: Tensor,
    attention_fn: HeadAttentionFn,
    step: int = 0,
    freq: Tensor | None = None,
) -> DraftOutput:
    """One draft pass with the attention as an argument: the same code paged and in training.

    Args:
        embeds: [..., H] embedding of token p + 1 at the row of position p.
        hidden: [..., H] the target's features of position p, or what the last pass recycled.
        positions: [...] p, not shifted.
        attention_fn: sees rotated queries and keys; the layer index picks a cache.
        step: draft step, which picks the layer when the depth rule is "cycle".
        freq: rotary frequencies [D / 2], if the caller keeps them.
    """
    block, axes = config.block, config.axes
    family = BLOCKS[axes.block].block
    if freq is None:
        freq = inv_freq(block.rope, block.rotary_dim, hidden.device)
    indices = layer_indices(axes, len(head.layers), step)
    first = indices[0]
    fused = fuse(head, config, embeds, hidden, positions, first)
    x, residual, wide = fused, None, {}
    if axes.fusion == "wide":
        x, wide = hidden, {"attention_input": fused}
        if axes.residual == "normed":
            x = fused[..., hidden.shape[-1] :]
    rotation = layers.rotary(freq, positions, x.dtype, block.rope.attention_factor)
    for index in indices:
        attention = _at_layer(attention_fn, index)
        x, residual = family.layer(
            head.layers[index], block, x, residual, rotation, attention, **wide
        )
        wide = {}
    weight = owned(head.norm, first) if axes.final_norm else None
    normed, out = final_norm(family, block, weight)(x, residual)
    recycle = {"pre_norm": out, "post_norm": normed, "pinned": hidden}[axes.recycle]
    return DraftOutput(for_logits=normed, recycle=recycle)


def layer_indices(axes: HeadAxes, num_layers: int, step: int) -> range:
    """Layers that a draft step runs: the whole stack, or layer `step mod n`."""
    if axes.depth_rule == "cycle":
        return range(step % num_layers, step % num_layers + 1)
    return range(num_layers)


def forward(
    head: EagleHead,
    config: EagleConfig,
    embed: Tensor,
    freq: Tensor,
    input_ids: Tensor,
    hidden: Tensor,
    batch: Batch,
    cache: HeadCache,
    step: int,
) -> DraftOutput:
    """`eagle_block` over a paged batch; `input_ids` [T] are target ids, shifted by one."""
    block = BLOCKS[config.axes.block].block
    attentions = block.attentions(config.block, batch, cache, hidden.dtype)
    embeds = F.embedding(input_ids, embed)
    return eagle_block(head, config, embeds, hidden, batch.positions, attentions, step, freq)


def eagle_draft(
    head: EagleHead,
    config: EagleConfig,
    target: Target,
    *,
    embed: Tensor | None = None,
    lm_head: Tensor | None = None,
    d2t: Tensor | None = None,
) -> Draft:
    """Binds a head to its target.

    Args:
        head: plain tensors in the target's dtype and device (a head in training too).
        embed: own table [V, H]; None shares the target's.
        lm_head: own matrix [V_draft, H]; None shares the target's, all of it or the rows of d2t.
        d2t: target id of each draft id, [V_draft] int64 strictly increasing; None: the same ids.
            Ids at or past the target's real vocabulary are left out.
    """
    embed = target.embed if embed is None else embed
    vocab_map, vocab_size = None, target.vocab_size
    if d2t is not None:
        d2t = d2t[d2t < target.vocab_size].to(target.embed.device)
        vocab_map, vocab_size = make_vocab_map(d2t, target.lm_head.shape[0]), d2t.numel()
        if lm_head is None:
            lm_head = target.lm_head.index_select(0, d2t)
    logits_size = len(target.lm_head if lm_head is None else lm_head)
    if lm_head is None:
        project = target.logits
    else:
        vocab_size = min(vocab_size, lm_head.shape[0])
        project = partial(_project, layers.pack(lm_head))
    packed = pack_head(head, config)
    block, axes = config.block, config.axes
    freq = inv_freq(block.rope, block.rotary_dim, embed.device)

    def logits(hidden: Tensor, step: int = 0) -> Tensor:
        return project(hidden)

    return Draft(
        config=config,
        params=packed,
        features=torch.no_grad()(partial(features, packed, config)),
        forward=torch.no_grad()(partial(forward, packed, config, embed, freq)),
        logits=torch.no_grad()(logits),
        new_cache=partial(new_cache, config, embed.device, embed.dtype),
        logits_size=logits_size,
        vocab_size=vocab_size,
        vocab_map=vocab_map,
        max_position=block.max_position,
        aux_layers=config.aux_layers,
        num_depths=len(head.layers) if axes.depth_rule == "cycle" else 1,
        embed=embed,
    )


def features(head: EagleHead, config: EagleConfig, out: TargetOutput) -> Tensor:
    """[T, H] hidden states for the first draft step."""
    if config.axes.input_features == "last_hidden":
        return out.hidden
    return combine_aux(head, config, out.aux)


def new_cache(
    config: EagleConfig, device: torch.device, dtype: torch.dtype, shape: CacheShape
) -> HeadCache:
    """Zeroed pages of each layer, and the hidden states that layers taking turns hand on."""
    count, block = config.block.num_layers, BLOCKS[config.axes.block].block
    pages = block.new_cache(config.block, count, device, dtype, shape)
    depths = count if config.axes.depth_rule == "cycle" else 1
    carry = torch.zeros(
        depths - 1, shape.num_slots, config.block.hidden_size, device=device, dtype=dtype
    )
    return HeadCache(pages.keys, pages.values, carry)


def pack_head(head: EagleHead, config: EagleConfig) -> EagleHead:
    """The head with its matrices packed for the CPU."""
    block = BLOCKS[config.axes.block].block
    return head._replace(
        fc=layers.map_tree(layers.pack, head.fc),
        aux_fc=layers.map_tree(layers.pack, head.aux_fc),
        layers=tuple(block.pack(layer) for layer in head.layers),
    )


def make_vocab_map(d2t: Tensor, num_target_ids: int) -> VocabMap:
    """Both directions of a reduced vocabulary from absolute target ids [V_draft], increasing."""
    t2d = torch.full((num_target_ids,), -1, dtype=torch.int64, device=d2t.device)
    t2d[d2t] = torch.arange(d2t.numel(), device=d2t.device)
    return VocabMap(d2t=d2t, t2d=t2d)


def _project(weight: Tensor, hidden: Tensor) -> Tensor:
    return linear(hidden, weight)


def _at_layer(attention_fn: HeadAttentionFn, layer: int) -> AttentionFn:
    if callable(attention_fn):
        return lambda query, key, value: attention_fn(query, key, value, layer)
    return attention_fn[layer]
