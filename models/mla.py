"""Multi-head latent attention (arXiv 2405.04434, section 2.1) in its absorbed form.

One latent of kv_lora_rank numbers and one rotated key of qk_rope_head_dim numbers are kept a token,
for all heads together. A head's key and value matrices act on its query and on its output instead
of on the cached latents, so the latent itself is both the one key head and the values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.models import layers
from specdec.models.batch import Batch, Cache, CacheShape
from specdec.models.layers import Rotary, linear, pack, rms_norm
from specdec.models.paged import AttentionFn, PagedAttention, attention_rows
from specdec.models.parts import Part, part

LATENT_NORM_EPS = 1e-6  # of the two latent norms, whatever rms_norm_eps says


class Mla(NamedTuple):
    """R: latent rank, P: rotated dimensions, N: other key dimensions, Dv: value dimension."""

    q_down: Tensor | None  # [Rq, H]; None: queries come straight from the hidden state
    q_down_bias: Tensor | None
    q_norm: Tensor | None  # [Rq]
    q_up: Tensor  # [Hq * (N + P), Rq or H]
    kv_down: Tensor  # [R + P, H]
    kv_down_bias: Tensor | None
    kv_norm: Tensor  # [R]
    kv_up: Tensor  # [Hq, N + Dv, R]
    out: Tensor  # [H, Hq * Dv]
    out_bias: Tensor | None


def latent_attention(
    params: Mla, config: Any, hidden: Tensor, rotation: Rotary, attention: AttentionFn
) -> Tensor:
    """[..., H] -> [..., H]; `attention` sees queries [..., Hq, R + P], a key [..., 1, R + P] and,
    as the value, the key's first R columns."""
    query = hidden
    if params.q_down is not None:
        query = linear(hidden, params.q_down, params.q_down_bias)
        query = rms_norm(query, params.q_norm, LATENT_NORM_EPS)
    nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    query = linear(query, params.q_up).unflatten(-1, (config.num_heads, nope + rope))
    latent = linear(hidden, params.kv_down, params.kv_down_bias).unsqueeze(-2)

    key_up, value_up = params.kv_up.split((nope, config.v_head_dim), dim=1)
    absorbed = torch.einsum("...hn,hnr->...hr", query[..., :nope], key_up)
    query = torch.cat((absorbed, _rotate(query[..., nope:], rotation, config)), dim=-1)
    key = torch.cat(
        (
            rms_norm(latent[..., :rank], params.kv_norm, LATENT_NORM_EPS),
            _rotate(latent[..., rank:], rotation, config),
        ),
        dim=-1,
    )
    out = attention(query, key, key[..., :rank])  # [..., Hq, R]
    out = torch.einsum("...hr,hvr->...hv", out, value_up).flatten(-2)
    return linear(out, params.out, params.out_bias)


def latent_attentions(
    config: Any, batch: Batch, cache: Cache, dtype: torch.dtype
) -> list[AttentionFn]:
    """Attention over paged latents, for each layer of the cache."""
    rows = attention_rows(batch, config.num_heads, 1, dtype)
    return [
        PagedAttention(
            latents, None, batch.slot_mapping, rows, config.attention_scale, config.kv_lora_rank
        )
        for latents in cache.keys
    ]


def new_latent_cache(
    config: Any,
    num_layers: int,
    device: torch.device | str,
    dtype: torch.dtype,
    shape: CacheShape,
) -> Cache:
    """Zeroed pages [num_blocks, block_size, 1, R + P] a layer, and no values of their own."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    pages = (shape.num_blocks, shape.block_size, 1, width)
    keys = tuple(torch.zeros(pages, device=device, dtype=dtype) for _ in range(num_layers))
    return Cache(keys, ())


def pack_mla(params: Mla) -> Mla:
    """The matrices packed for the CPU, but for the heads' own."""
    return params._replace(
        q_down=None if params.q_down is None else pack(params.q_down),
        q_up=pack(params.q_up),
        kv_down=pack(params.kv_down),
        out=pack(params.out),
    )


def mla_layout(config: Any, prefix: str) -> Mla:
    """Layout of the tensors below `prefix` (as in "model.layers.3.self_attn.")."""
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    low, width = config.q_lora_rank, heads * (nope + rope)
    bias = config.attention_bias

    def weight(name: str, *shape: int) -> Part:
        return part(f"{prefix}{name}.weight", *shape)

    def biases(name: str, rows: int, wanted: bool = True) -> Part | None:
        return part(f"{prefix}{name}.bias", rows) if bias and wanted else None

    up = f"{prefix}kv_b_proj.weight"
    return Mla(
        q_down=weight("q_a_proj", low, hidden) if low else None,
        q_down_bias=biases("q_a_proj", low or 0, bool(low)),
        q_norm=weight("q_a_layernorm", low) if low else None,
        q_up=weight("q_b_proj", width, low) if low else weight("q_proj", width, hidden),
        kv_down=weight("kv_a_proj_with_mqa", rank + rope, hidden),
        kv_down_bias=biases("kv_a_proj_with_mqa", rank + rope),
        kv_norm=weight("kv_a_layernorm", rank),
        kv_up=Part({up: (heads * (nope + value), rank)}, shape=(heads, nope + value, rank)),
        out=weight("o_proj", hidden, heads * value),
        out_bias=biases("o_proj", hidden),
    )


def _rotate(x: Tensor, rotation: Rotary, config: Any) -> Tensor:
    """Rotates [..., heads, P]; interleaved pairs (0, 1), (2, 3).. come out as halves, which queries
    and keys share."""
    if config.rope_interleave:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return layers.rotate(x, rotation)
