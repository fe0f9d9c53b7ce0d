"""Qwen3-Next with a copy of every state after every token: the plain way to roll back, for tests.

Straight-line code over one row at a time; nothing is shared with the production recurrence.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.models.batch import Target
from specdec.models.decoder import decoder_target, paged_attentions
from specdec.models.qwen3_next import QWEN3_NEXT, new_cache


class SnapshotCache(NamedTuple):
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    layers: tuple[dict[int, dict[int, Any]], ...]
    # of each DeltaNet layer: slot -> number of tokens -> (last W - 1 convolution inputs, state)


def snapshot_target(target: Target) -> Target:
    """The same model; every forward looks its starting states up by its first positions."""

    def cache(config, num_layers, device, dtype, shape):
        paged = new_cache(config, num_layers, device, dtype, shape)
        return SnapshotCache(paged.keys, paged.values, tuple({} for _ in paged.states))

    block = QWEN3_NEXT._replace(attentions=_functions, new_cache=cache)
    return decoder_target(block, target.params, target.config, target.vocab_size)


def _functions(config, batch, cache, dtype):
    attentions = iter(paged_attentions(config, batch, cache, dtype))
    slots = iter(cache.layers)
    return [
        next(attentions) if attends else partial(_recur, config.delta, batch, next(slots))
        for attends in config.is_attention
    ]


def _recur(config, batch, slots, mixer, inputs):
    out = inputs.new_zeros(len(inputs), config.num_value_heads, config.value_dim)
    starts = batch.query_start.tolist()
    for slot, begin, end in zip(batch.request_slots.tolist(), starts, starts[1:], strict=False):
        rows = [row for row in range(begin, end) if batch.row_valid[row]]
        if not rows:
            continue
        position = int(batch.positions[rows[0]])
        text = slots.setdefault(slot, {0: empty(config)})
        if position == 0:
            text[0] = empty(config)
        before, state = text[position]
        for row in rows:
            out[row], before, state = token(config, mixer, inputs[row], before, state)
            position += 1
            text[position] = (before, state)
    return out


def empty(config):
    state = torch.zeros(config.num_value_heads, config.key_dim, config.value_dim)
    return torch.zeros(config.conv_width - 1, config.num_channels), state


def token(config, mixer, inputs, before, state):
    """One token: output [Hv, Dv], and the new convolution inputs and state."""
    heads, keys = config.num_value_heads, config.num_key_heads * config.key_dim
    seen = torch.cat((before, inputs[None, : config.num_channels]))
    mixed = torch.nn.functional.silu((seen * mixer.conv.T).sum(dim=0))
    query, key, value = mixed.split([keys, keys, heads * config.value_dim])
    strength, step = inputs[config.num_channels :].split(heads)
    rate = torch.log1p((step + mixer.step_bias).exp()) * mixer.decay_log.exp()
    query, key = (x.view(config.num_key_heads, -1) for x in (query, key))
    query, key = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    out, new = [], []
    for head in range(heads):
        k = key[head * config.num_key_heads // heads]
        q = query[head * config.num_key_heads // heads]
        old = state[head] * torch.exp(-rate[head])
        v = value.view(heads, -1)[head]
        new.append(old + torch.outer(k, torch.sigmoid(strength[head]) * (v - k @ old)))
        out.append(q @ new[-1] / config.key_dim**0.5)
    return torch.stack(out), seen[1:], torch.stack(new)
