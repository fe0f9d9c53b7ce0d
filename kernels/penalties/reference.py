"""Repetition, presence and frequency penalties from counts that each slot keeps."""

import torch
from torch import Tensor

IN_PROMPT = 1  # bit 0 of a packed count; the rest, shifted by one, counts outputs


def pack_counts(in_prompt: Tensor, num_output: Tensor) -> Tensor:
    """Packed counts int32 from a bool tensor and an integer tensor of one shape."""
    return (num_output.int() << 1) | in_prompt.int()


def apply_penalties_(
    logits: Tensor,
    counts: Tensor,
    slots: Tensor,
    prefix: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    vocab_size: int,
) -> None:
    """Penalises logits [n, V] in place for what stands before each row.

    An id that the prompt, the output or the drafts before the row hold is divided by `repetition`
    where its logit is positive and multiplied where not (Keskar et al., 2019); then, for the output
    and those drafts alone, `frequency` times its count and `presence` once are subtracted.

    Args:
        counts: [S, >= vocab_size] int32 packed counts (`pack_counts`).
        slots: [n] int64 row of `counts` for each logits row.
        prefix: [n, K] int64 drafts that a row comes after, padded with negative ids.
        repetition, presence, frequency: [n] fp32; 1, 0 and 0 change nothing.
    """
    packed = counts[slots, :vocab_size]
    real = (prefix >= 0) & (prefix < vocab_size)
    drafted = torch.zeros_like(packed)
    drafted.scatter_add_(1, prefix.clamp(0, vocab_size - 1), real.to(packed.dtype))
    num_output = (packed >> 1) + drafted
    seen = (num_output > 0) | (packed & IN_PROMPT > 0)
    x = logits[:, :vocab_size].float()
    factor = torch.where(seen, repetition[:, None], 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    x = x - frequency[:, None] * num_output - presence[:, None] * (num_output > 0)
    logits[:, :vocab_size] = x.to(logits.dtype)
