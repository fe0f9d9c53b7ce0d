"""Distances between a head's and the target's next-token distributions, and the chunked loss.

The frozen lm_head makes a closed form possible: the gradient with respect to a row's logits is
known as soon as its two distributions are, so a chunk's logits live only while that chunk is
computed and the backward pass needs none of them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.training.packing import Row


class RowLoss(NamedTuple):
    """What a divergence says of n labels at each of K unroll steps."""

    loss: Tensor  # [K, n] fp32
    grad: Tensor  # [K, n, V] weight * d loss / d student logits, in the logits' dtype
    agrees: Tensor  # [K, n] bool, the student's largest logit is at the target's argmax
    overlap: Tensor  # [K, n] fp32, sum of min(p, q): the chance that a sampled draft is kept


class StepMetrics(NamedTuple):
    """Sums over a row's supervised labels, one entry an unroll step."""

    loss: Tensor  # [K] fp32
    agrees: Tensor  # [K]
    overlap: Tensor  # [K] fp32


def divergence(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    kl: float = 1.0,
    cross_entropy: float = 0.0,
    total_variation: float = 0.0,
    log_acceptance: float = 0.0,
) -> RowLoss:
    """A weighted sum of KL(p || q), -log q(label), 1 - sum min(p, q) and -log sum min(p, q).

    p is the target's distribution, q the head's, both at temperature 1.

    Args:
        student: [K, n, V] logits of the head.
        teacher: [n, V] logits of the target.
        labels: [n] ids of the text; read by cross_entropy only.
        weights: [K, n] fp32, multiplied into the gradient but not into the loss.
    """
    best = teacher.argmax(-1)[None, :, None].expand(len(student), -1, 1)
    agrees = (student.gather(-1, best) == student.amax(-1, keepdim=True)).squeeze(-1)
    log_q = torch.log_softmax(student.float(), dim=-1)
    log_p = torch.log_softmax(teacher.float(), dim=-1)
    q, p = log_q.exp(), log_p.exp()
    overlap = torch.minimum(p, q).sum(-1)
    loss = torch.zeros_like(overlap)
    grad = torch.zeros_like(q)
    if kl:
        loss = loss + kl * (p * (log_p - log_q)).sum(-1)
        grad = grad + kl * (q - p)
    if cross_entropy:
        is_label = torch.arange(q.shape[-1], device=q.device) == labels[:, None]
        chosen = labels[None, :, None].expand(len(student), -1, 1)
        loss = loss - cross_entropy * log_q.gather(-1, chosen).squeeze(-1)
        grad = grad + cross_entropy * (q - is_label.float())
    if total_variation or log_acceptance:
        loss = loss + total_variation * (1 - overlap)
        if log_acceptance:
            loss = loss - log_acceptance * overlap.log()
        lacking = q * (q < p)  # the entries that a larger logit would help
        scale = total_variation + log_acceptance / overlap[..., None]
        grad = grad + scale * (q * lacking.sum(-1, keepdim=True) - lacking)
    return RowLoss(loss, (grad * weights[..., None]).to(student.dtype), agrees, overlap)


def step_weights(num_steps: int, decay: float) -> list[float]:
    """decay^k for unroll step k, normalised to sum 1."""
    weights = [decay**k for k in range(num_steps)]
    return [w / sum(weights) for w in weights]


def unrolled_loss(
    hidden: Tensor,
    target_hidden: Tensor,
    lm_head: Tensor,
    row: Row,
    divergence: Callable[..., RowLoss],
    weights: Sequence[float],
    *,
    own_head: Tensor | None = None,
    t2d: Tensor | None = None,
    num_chunks: int = 16,
) -> tuple[Tensor, StepMetrics]:
    """Distance to the target over every supervised label and unroll step.

    The label in column j of the row is predicted by the target from column j - 1 and by unroll
    step k of the head from column j - 2 - k, so one product with the lm_head per label serves the
    target for all K steps.

    Args:
        hidden: [K, T, H] what the head's unroll steps give to the lm_head; takes the gradient.
        target_hidden: [T, H] after the target's final norm.
        lm_head: [V, H], frozen; some of the target's rows when the draft vocabulary is reduced.
        divergence: (student [K, n, V], teacher [n, V], labels [n], weights [K, n]) -> RowLoss.
        weights: [K] of the sums over labels; divide by the number of labels beforehand.
        own_head: [V, H] that the head's hidden states meet instead of `lm_head`; takes the gradient
            too.
        t2d: [V_target] draft id of each target id, -1 where the reduced vocabulary has none. Such
            labels are left out.
        num_chunks: the head's logits exist for T / num_chunks rows at a time, those of the same
            labels at all K steps.

    Returns:
        sum_k weights[k] * sum_labels loss, and the unweighted sums.
    """
    loss, *sums = _UnrolledLoss.apply(
        hidden, own_head, target_hidden, lm_head, row, divergence, tuple(weights), t2d, num_chunks
    )
    return loss, StepMetrics(*sums)


class _UnrolledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, own_head, target_hidden, lm_head, row, divergence, weights, t2d, num_chunks
    ):
        head = lm_head if own_head is None else own_head
        head_grad = None if own_head is None else torch.zeros_like(own_head, dtype=torch.float32)
        num_steps, num_columns, width = hidden.shape
        size = -(-num_columns // (num_chunks * num_steps))
        labels, valid = _padded_labels(row, size, t2d)
        label_ids = row.input_ids[labels]
        if t2d is not None:
            label_ids = t2d[label_ids].clamp(min=0)
        step = torch.arange(num_steps, device=hidden.device)[:, None]
        scales = torch.tensor(weights, dtype=torch.float32).to(hidden.device, non_blocking=True)
        reached = valid & (row.positions[labels] >= step + 2)  # [K, N]
        # row T of the gradient takes what the padded and unreachable labels write
        column = torch.where(reached, labels - 2 - step, num_columns)
        source = step * num_columns + column.clamp(max=num_columns - 1)
        sink = step * (num_columns + 1) + column
        flat = hidden.reshape(-1, width)
        grad = hidden.new_zeros(num_steps * (num_columns + 1), width)
        sums = torch.zeros(3, num_steps, dtype=torch.float32, device=hidden.device)
        for first in range(0, len(labels), size):
            chunk = slice(first, first + size)
            teacher = target_hidden[labels[chunk] - 1] @ lm_head.T
            taken = flat[source[:, chunk].flatten()]
            student = (taken @ head.T).view(num_steps, size, -1)
            counted = reached[:, chunk].float()
            rows = divergence(student, teacher, label_ids[chunk], scales[:, None] * counted)
            flat_grad = rows.grad.flatten(0, 1)
            grad.index_copy_(0, sink[:, chunk].flatten(), flat_grad @ head)
            if head_grad is not None:
                head_grad += flat_grad.T @ taken
            sums += (torch.stack([rows.loss, rows.agrees, rows.overlap]) * counted).sum(-1)
        ctx.save_for_backward(grad.view(num_steps, -1, width)[:, :num_columns], head_grad)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(*sums)
        return (sums[0] * scales).sum(), *sums

    @staticmethod
    def backward(ctx, *grads):
        grad_loss, (grad, head_grad) = grads[0], ctx.saved_tensors
        if head_grad is not None:
            head_grad = (head_grad * grad_loss).to(ctx.head_dtype)
        return grad * grad_loss.to(grad.dtype), head_grad, *(None,) * 7


def _padded_labels(row: Row, size: int, t2d: Tensor | None) -> tuple[Tensor, Tensor]:
    """Label columns filled up to a multiple of `size`, so that every chunk has one shape."""
    labels = row.labels
    pad = -len(labels) % size
    valid = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    if t2d is not None:
        valid = t2d[row.input_ids[labels]] >= 0
    return (
        torch.nn.functional.pad(labels, (0, pad), value=1),
        torch.nn.functional.pad(valid, (0, pad), value=False),
    )


def compiled(divergence: Callable[..., RowLoss]) -> Callable[..., RowLoss]:
    """The divergence fused by torch.compile: two reads of each logits row instead of a dozen."""
    keywords = divergence.keywords if isinstance(divergence, partial) else {}
    function = divergence.func if isinstance(divergence, partial) else divergence
    return partial(torch.compile(function, dynamic=False), **keywords)
