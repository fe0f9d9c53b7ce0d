"""Draft heads on Llama blocks: embed, (norm), fuse, block(s), logits, as a row of `HeadAxes` says.

The defaults of the row are Eagle for Llama (arXiv 2401.15077, in the layout of
yuhuili/EAGLE-LLaMA3.1-Instruct-8B): fc(cat(embed, hidden)), a block without an input norm, no final
norm, and its output both as the logits' input and as the next step's hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.paged_attention.reference import fold_groups
from specdec.models import layers
from specdec.models.axes import EAGLE_LLAMA, HeadAxes
from specdec.models.batch import Batch, Cache, Draft, DraftOutput, Target, VocabMap
from specdec.models.layers import linear, rms_norm
from specdec.models.llama import LlamaConfig, LlamaLayer, llama_layer, new_cache, pack_layer
from specdec.models.rope import inv_freq

HeadAttentionFn = Callable[[Tensor, Tensor, Tensor, int], Tensor]
# (query [..., Hq, D], key [..., Hkv, D], value [..., Hkv, D], layer) -> [..., Hq, D]


@dataclass(frozen=True)
class EagleConfig:
    block: LlamaConfig  # vocab_size is the embedding's
    axes: HeadAxes = EAGLE_LLAMA


class EagleHead(NamedTuple):
    """The head's own parameters: all that is trained and exported besides an own vocabulary."""

    fc: Tensor  # [H, 2 H]
    fc_bias: Tensor | None
    embed_norm: Tensor | None  # [H], with fusion norm_cat
    hidden_norm: Tensor | None  # [H], with fusion norm_cat
    layers: tuple[LlamaLayer, ...]
    norm: Tensor | None  # [H], with final_norm


def fuse(
    head: EagleHead, config: EagleConfig, embeds: Tensor, hidden: Tensor, positions: Tensor
) -> Tensor:
    """[..., H] next-token embeddings and [..., H] hidden states to the block's input [..., H]."""
    axes, eps = config.axes, config.block.rms_norm_eps
    if axes.position0_embedding == "zeroed":
        embeds = embeds.masked_fill((positions == 0).unsqueeze(-1), 0)
    if axes.fusion == "norm_cat":
        embeds = rms_norm(embeds, head.embed_norm, eps)
        hidden = rms_norm(hidden, head.hidden_norm, eps)
    return linear(torch.cat((embeds, hidden), dim=-1), head.fc, head.fc_bias)


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
        hidden: [..., H] the target's hidden of position p, or what the last pass recycled.
        positions: [...] p, not shifted.
        attention_fn: sees rotated queries and keys; the layer index picks a cache.
        step: draft step, which picks the layer when the depth rule is "cycle".
        freq: rotary frequencies [D / 2], if the caller keeps them.
    """
    block, axes = config.block, config.axes
    if freq is None:
        freq = inv_freq(block.rope, block.head_dim, hidden.device)
    x, residual = fuse(head, config, embeds, hidden, positions), None
    rotation = layers.rotary(freq, positions, x.dtype, block.rope.attention_factor)
    for index in layer_indices(axes, len(head.layers), step):
        attention = partial(_at_layer, attention_fn, index)
        x, residual = llama_layer(head.layers[index], block, x, residual, rotation, attention)
    out = x + residual
    normed = rms_norm(out, head.norm, block.rms_norm_eps) if axes.final_norm else out
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
    cache: Cache,
    step: int,
) -> DraftOutput:
    """`eagle_block` over a paged batch; `input_ids` [T] are target ids, shifted by one."""
    block = config.block
    groups = fold_groups(
        batch.groups, input_ids.shape[0], block.num_heads, block.num_kv_heads, hidden.dtype
    )

    def attention_fn(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        return layers.attend(
            query,
            key,
            value,
            slot_mapping=batch.slot_mapping,
            groups=groups,
            key_cache=cache.keys[layer],
            value_cache=cache.values[layer],
            scale=block.attention_scale,
        )

    embeds = F.embedding(input_ids, embed)
    return eagle_block(head, config, embeds, hidden, batch.positions, attention_fn, step, freq)


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
    if lm_head is None:
        project = target.logits
    else:
        vocab_size = min(vocab_size, lm_head.shape[0])
        project = partial(_project, layers.pack(lm_head))
    packed = head._replace(
        fc=layers.pack(head.fc), layers=tuple(pack_layer(layer) for layer in head.layers)
    )
    block = config.block
    freq = inv_freq(block.rope, block.head_dim, embed.device)

    def logits(hidden: Tensor, step: int = 0) -> Tensor:
        return project(hidden)

    return Draft(
        config=config,
        params=packed,
        features=_last_hidden,
        forward=torch.no_grad()(partial(forward, packed, config, embed, freq)),
        logits=torch.no_grad()(logits),
        new_cache=partial(new_cache, block, len(head.layers), embed.device, embed.dtype),
        vocab_size=vocab_size,
        vocab_map=vocab_map,
        max_position=block.max_position,
    )


def make_vocab_map(d2t: Tensor, num_target_ids: int) -> VocabMap:
    """Both directions of a reduced vocabulary from absolute target ids [V_draft], increasing."""
    t2d = torch.full((num_target_ids,), -1, dtype=torch.int64, device=d2t.device)
    t2d[d2t] = torch.arange(d2t.numel(), device=d2t.device)
    return VocabMap(d2t=d2t, t2d=t2d)


def init_head(
    block: LlamaConfig,
    axes: HeadAxes = EAGLE_LLAMA,
    *,
    seed: int = 0,
    std: float = 0.02,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> EagleHead:
    """A head to train, `block.num_layers` deep, whose first logits are the target's own head's.

    fc = [0 | I] passes the hidden state on, and zero output projections make the block add nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = block.hidden_size, block.num_heads * block.head_dim
    inner, kv = block.intermediate_size, block.num_kv_heads * block.head_dim
    factory = {"device": device, "dtype": dtype}

    def normal(rows: int) -> Tensor:
        return (torch.randn(rows, hidden, generator=generator) * std).to(**factory)

    def ones(wanted: bool = True) -> Tensor | None:
        return torch.ones(hidden, **factory) if wanted else None

    def bias(wanted: bool, rows: int) -> Tensor | None:
        return torch.zeros(rows, **factory) if wanted else None

    def layer(index: int) -> LlamaLayer:
        return LlamaLayer(
            input_norm=ones(index > 0 or axes.first_input_norm),
            qkv=normal(heads + 2 * kv),
            qkv_bias=bias(block.attention_bias, heads + 2 * kv),
            out=torch.zeros(hidden, heads, **factory),
            out_bias=bias(block.attention_bias, hidden),
            post_norm=ones(),
            gate_up=normal(2 * inner),
            gate_up_bias=bias(block.mlp_bias, 2 * inner),
            down=torch.zeros(hidden, inner, **factory),
            down_bias=bias(block.mlp_bias, hidden),
        )

    return EagleHead(
        fc=torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), dim=1).to(**factory),
        fc_bias=None,
        embed_norm=ones(axes.fusion == "norm_cat"),
        hidden_norm=ones(axes.fusion == "norm_cat"),
        layers=tuple(layer(index) for index in range(block.num_layers)),
        norm=ones(axes.final_norm),
    )


def _last_hidden(out):
    return out.hidden


def _project(weight: Tensor, hidden: Tensor) -> Tensor:
    return linear(hidden, weight)


def _at_layer(attention_fn: HeadAttentionFn, layer: int, query, key, value) -> Tensor:
    return attention_fn(query, key, value, layer)
