"""The gated DeltaNet token mixer: projections, convolution, gated delta rule, gated norm, with the
recurrence as an argument. `delta_windows` is the recurrence of an engine's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.gated_delta import reference
from specdec.kernels.gated_delta.reference import causal_conv, gated_delta_chunked
from specdec.kernels.runtime import uses_triton
from specdec.models.layers import linear, pack


@dataclass(frozen=True)
class DeltaNetConfig:
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: all query, key and value heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_inputs(self) -> int:
        """What the recurrence reads of a row: the channels, then strength and step of each head."""
        return self.num_channels + 2 * self.num_value_heads


class DeltaNet(NamedTuple):
    """Parameters of one mixer. n: `num_inputs`, C: channels."""

    in_proj: Tensor  # [n + Hv * Dv, H] rows: query, key, value, strength, step, output gate
    conv: Tensor  # [C, W]
    decay_log: Tensor  # [Hv] log of the decay's rate
    step_bias: Tensor  # [Hv]
    norm: Tensor  # [Dv], plain
    out: Tensor  # [H, Hv * Dv]


RecurrenceFn = Callable[[DeltaNet, Tensor], Tensor]
# (mixer, inputs [..., n]) -> [..., Hv, Dv]


def delta_mixer(
    mixer: DeltaNet, config: DeltaNetConfig, hidden: Tensor, recurrence: RecurrenceFn
) -> Tensor:
    """[..., H] -> [..., H] with the recurrence as an argument."""
    projected = linear(hidden, mixer.in_proj)
    out = recurrence(mixer, projected[..., : config.num_inputs])
    gate = projected[..., config.num_inputs :].unflatten(-1, (-1, config.value_dim))
    return linear(gated_norm(out, gate, mixer.norm, config.norm_eps).flatten(-2), mixer.out)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate) over the last dimension [..., Hv, Dv], in fp32, in x's
    dtype."""
    if uses_triton() and x.dim() == 3:
        from specdec.kernels.gated_delta.kernel import gated_norm

        return gated_norm(x, gate, weight, eps)
    return reference.gated_norm(x, gate, weight, eps)


class Operands(NamedTuple):
    """Arguments of the delta rule over N requests of T rows."""

    query: Tensor  # [N, T, Hk, Dk]
    key: Tensor  # [N, T, Hk, Dk]
    value: Tensor  # [N, T, Hv, Dv]
    decay: Tensor  # [N, T, Hv] fp32
    beta: Tensor  # [N, T, Hv]


def delta_operands(
    mixer: DeltaNet, config: DeltaNetConfig, inputs: Tensor, valid: Tensor
) -> Operands:
    """What the delta rule takes of inputs [N, W - 1 + T, n], whose first W - 1 rows came before.

    Rows that are not `valid` [N, T] leave the state as it is, whatever they hold.
    """
    channels, heads = config.num_channels, config.num_value_heads
    mixed = causal_conv(inputs[..., :channels], mixer.conv)
    mixed = mixed.masked_fill(~valid.unsqueeze(-1), 0)
    keys = config.num_key_heads * config.key_dim
    query, key, value = mixed.split([keys, keys, heads * config.value_dim], dim=-1)
    strength, step = inputs[:, config.conv_width - 1 :, channels:].split(heads, dim=-1)
    decay = -mixer.decay_log.float().exp() * F.softplus(step.float() + mixer.step_bias.float())
    return Operands(
        query.unflatten(-1, (-1, config.key_dim)),
        key.unflatten(-1, (-1, config.key_dim)),
        value.unflatten(-1, (-1, config.value_dim)),
        decay.masked_fill(~valid.unsqueeze(-1), 0),
        strength.sigmoid().masked_fill(~valid.unsqueeze(-1), 0),
    )


def whole_texts(config: DeltaNetConfig, mixer: DeltaNet, inputs: Tensor) -> Tensor:
    """The recurrence from each text's start: inputs [N, T, n] -> [N, T, Hv, Dv]; has gradients."""
    padded = F.pad(inputs, (0, 0, config.conv_width - 1, 0))
    valid = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    operands = delta_operands(mixer, config, padded, valid)
    return gated_delta_chunked(*operands, new_states(config, len(inputs), inputs.device))[0]


def packed_texts(
    config: DeltaNetConfig, cu_seqlens: Tensor, max_len: int, mixer: DeltaNet, inputs: Tensor
) -> Tensor:
    """`whole_texts` of D texts laid end to end: inputs [T, n] -> [T, Hv, Dv].

    Args:
        cu_seqlens: [D + 1] where each text starts, from 0 to T.
        max_len: the longest text.
    """
    lengths = cu_seqlens.diff().long()
    first = torch.arange(len(lengths), device=inputs.device) * max_len - cu_seqlens[:-1]
    shift = first.repeat_interleave(lengths, output_size=len(inputs))
    place = torch.arange(len(inputs), device=inputs.device) + shift  # of each row among [D * L]
    padded = inputs.new_zeros(len(lengths) * max_len, inputs.shape[1]).index_copy(0, place, inputs)
    out = whole_texts(config, mixer, padded.view(len(lengths), max_len, -1))
    return out.flatten(0, 1).index_select(0, place)


def new_states(config: DeltaNetConfig, num_slots: int, device: torch.device | str) -> Tensor:
    """Zeroed states [S, Hv, Dk, Dv] fp32."""
    shape = (num_slots, config.num_value_heads, config.key_dim, config.value_dim)
    return torch.zeros(shape, device=device)


def pack_mixer(mixer: DeltaNet) -> DeltaNet:
    """The matrices packed for the CPU."""
    return mixer._replace(in_proj=pack(mixer.in_proj), out=pack(mixer.out))
