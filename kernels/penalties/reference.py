"""Repetition, presence and frequency penalties from counts that each slot keeps."""

import torch
from torch import Tensor

from specdec.kernels.row_stats.reference import row_requests

IN_PROMPT = 1  # bit 0 of a packed count; the rest, shifted by one, counts outputs
ONE_OUTPUT = 2  # what one more output adds to it


def pack_counts(in_prompt: Tensor, num_output: Tensor) -> Tensor:
    """Packed counts int32 from a bool tensor and an integer tensor of one shape."""
    return (num_output.int() << 1) | in_prompt.int()


def reset_counts_(
    counts: Tensor, slots: Tensor, token_ids: Tensor, prompt_len: Tensor, length: Tensor
) -> None:
    """Packed counts of slots anew, from their texts.

    Args:
        counts: [S, V] int32.
        slots: [A] int64 rows of `counts`, each once.
        token_ids: [A, L] int64 prompt, then output, then anything in [0, V).
        prompt_len, length: [A] int64; every prompt has a token.
    """
    column = torch.arange(token_ids.shape[1], device=counts.device)
    rows = slots[:, None].expand_as(token_ids)
    prompt = torch.where(column < prompt_len[:, None], token_ids, token_ids[:, :1])
    is_output = (column >= prompt_len[:, None]) & (column < length[:, None])
    counts[slots] = 0
    counts[rows, prompt] = IN_PROMPT
    counts.index_put_((rows, token_ids), is_output.to(counts.dtype) * ONE_OUTPUT, accumulate=True)


def apply_penalties_(
    logits: Tensor,
    counts: Tensor,
    drafts: Tensor,
    slots: Tensor,
    cu_num_logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    vocab_size: int,
) -> None:
    """Penalises logits [n, V] in place for what stands before each row: the prompt, the output and,
    at row j of a request, its drafts 0 .. j - 1.

    An id that stands there is divided by `repetition` where its logit is positive and multiplied
    where not (Keskar et al., 2019); then, for the output and those drafts alone, `frequency` times
    its count and `presence` once are subtracted.

    Args:
        counts: [S, >= vocab_size] int32 packed counts (`pack_counts`).
        drafts: [S, K] int64, padded with negative ids.
        slots: [R] int64 row of each request in all that have S rows.
        cu_num_logits: [R + 1] int64; request r owns rows cu[r] .. cu[r + 1] - 1, and the last one
            those past the end.
        repetition, presence, frequency: [S] fp32; 1, 0 and 0 change nothing.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)
    owner = row_requests(cu_num_logits, len(rows))
    slot, offset = slots[owner], rows - cu_num_logits[owner]
    prefix, packed = drafts[slot], counts[slot, :vocab_size]
    stands = torch.arange(prefix.shape[1], device=logits.device) < offset[:, None]
    stands &= (prefix >= 0) & (prefix < vocab_size)
    drafted = torch.zeros_like(packed)
    drafted.scatter_add_(1, prefix.clamp(0, vocab_size - 1), stands.to(packed.dtype))
    num_output = (packed >> 1) + drafted
    seen = (num_output > 0) | (packed & IN_PROMPT > 0)
    x = logits[:, :vocab_size].float()
    factor = torch.where(seen, repetition[slot, None], 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    x = x - frequency[slot, None] * num_output - presence[slot, None] * (num_output > 0)
    logits[:, :vocab_size] = x.to(logits.dtype)
