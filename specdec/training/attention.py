"""Causal attention inside each document of a row, and its extension to a head's unrolled columns.

At unroll step k the query of column p sees step 0's keys of its document up to column p, and the
keys of its own column at steps 1..k: the cache that drafting from column p would have filled.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.training.packing import Row


class FlashOps(NamedTuple):
    """Variable-length attention as two functions, both over [T, heads, D] and a row's documents."""

    forward: Callable  # (q, k, v, cu_seqlens, max_len, scale) -> (out, logsumexp [heads, T])
    backward: Callable  # (grad, q, k, v, out, logsumexp, cu_seqlens, max_len, scale) -> dq, dk, dv


def _flash_forward(q, k, v, cu_seqlens, max_len, scale):
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, True, False, scale=scale
    )
    return out, logsumexp


def _flash_backward(grad, q, k, v, out, logsumexp, cu_seqlens, max_len, scale):
    random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout: not read
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, logsumexp, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, True,
        random_state, q.new_empty(0), scale=scale,
    )  # fmt: skip


FLASH = FlashOps(_flash_forward, _flash_backward)


def row_attention(q: Tensor, k: Tensor, v: Tensor, row: Row, scale: float) -> Tensor:
    """Causal attention within each document.

    Args:
        q: [T, Hq, D]; k: [T, Hkv, D]; v: [T, Hkv, Dv], Dv at most D; Hq a multiple of Hkv.

    Returns:
        [T, Hq, Dv].
    """
    return unrolled_attention(q, [k], [v], row, scale)


def unrolled_attention(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], row: Row, scale: float
) -> Tensor:
    """Attention at unroll step len(keys) - 1: step 0's keys, and its own column's later ones.

    Uses flash attention for half-precision tensors on a GPU, else a padded [D, Hq, L, L + k] form.

    Args:
        q: [T, Hq, D], rotated at position + k.
        keys: one [T, Hkv, D] a step, rotated at position + step.
        values: one [T, Hkv, Dv] a step, Dv at most D.

    Returns:
        [T, Hq, Dv].
    """
    group = q.shape[1] // keys[0].shape[1]
    keys = [x.repeat_interleave(group, dim=1) for x in keys]
    values = [x.repeat_interleave(group, dim=1) for x in values]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        width = values[0].shape[-1]  # the flash kernels want values as wide as keys
        if width < q.shape[-1]:
            values = [F.pad(x, (0, q.shape[-1] - width)) for x in values]
        return flash_unrolled(q, keys, values, row, scale, FLASH)[..., :width]
    return padded_unrolled(q, keys, values, row, scale)


def padded_unrolled(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], row: Row, scale: float
) -> Tensor:
    """The definition: documents padded to one length, one softmax over all visible keys."""
    starts, lengths = row.cu_seqlens[:-1].long(), row.cu_seqlens.diff().long()
    offset = torch.arange(row.max_len, device=q.device)
    inside = offset < lengths[:, None]  # [D, L]
    column = torch.where(inside, starts[:, None] + offset, starts[:, None])
    padded_q, k, v = (x[column].transpose(1, 2) for x in (q, keys[0], values[0]))  # [D, Hq, L, d]
    scores = padded_q @ k.transpose(2, 3) * scale
    scores = scores.masked_fill(offset > offset[:, None], float("-inf"))
    own_keys = [x[column].transpose(1, 2) for x in keys[1:]]
    own = [(padded_q * x).sum(-1, keepdim=True) * scale for x in own_keys]
    probs = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(q.dtype)
    out = probs[..., : row.max_len] @ v
    for i, value in enumerate(values[1:]):
        out = out + probs[..., row.max_len + i, None] * value[column].transpose(1, 2)
    return out.transpose(1, 2)[inside]  # documents are consecutive, so this is column order


def flash_unrolled(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    row: Row,
    scale: float,
    ops: FlashOps,
) -> Tensor:
    """The same through a flash kernel for step 0 and elementwise products for the own column."""
    none = q.new_empty(0, *q.shape)
    own_keys, own_values = (torch.stack(list(x[1:])) if x[1:] else none for x in (keys, values))
    return _FlashUnrolled.apply(q, keys[0], values[0], own_keys, own_values, row, scale, ops)


class _FlashUnrolled(torch.autograd.Function):
    """Both parts share one log-sum-exp. A flash backward pass given the merged output and the
    merged log-sum-exp returns the merged softmax's gradient for its part of the keys, as in
    ring attention (2310.01889)."""

    @staticmethod
    def forward(ctx, q, k, v, own_k, own_v, row, scale, ops):
        out, lse = ops.forward(q, k, v, row.cu_seqlens, row.max_len, scale)
        if len(own_k):
            own = (q.float() * own_k).sum(-1) * scale  # [k, T, Hq]
            merged = torch.logsumexp(torch.cat([lse.T[None], own]), dim=0)  # [T, Hq]
            probs = (own - merged).exp()
            out = (lse.T - merged).exp()[..., None] * out + (probs[..., None] * own_v).sum(0)
            out, lse = out.to(q.dtype), merged.T.contiguous()
            ctx.save_for_backward(q, k, v, own_k, own_v, out, lse, probs)
        else:
            ctx.save_for_backward(q, k, v, own_k, own_v, out, lse, own_k)
        ctx.row, ctx.scale, ctx.ops = row, scale, ops
        return out

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, own_k, own_v, out, lse, probs = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = ctx.ops.backward(
            grad, q, k, v, out, lse, ctx.row.cu_seqlens, ctx.row.max_len, ctx.scale
        )
        own_dk, own_dv = torch.zeros_like(own_k), torch.zeros_like(own_v)
        if len(own_k):
            wide = grad.float()
            centre = (wide * out).sum(-1)  # [T, Hq]
            dscore = probs * ((wide * own_v).sum(-1) - centre) * ctx.scale
            dq = (dq + (dscore[..., None] * own_k).sum(0)).to(q.dtype)
            own_dk = (dscore[..., None] * q).to(q.dtype)
            own_dv = (probs[..., None] * wide).to(q.dtype)
        return dq, dk, dv, own_dk, own_dv, None, None, None
