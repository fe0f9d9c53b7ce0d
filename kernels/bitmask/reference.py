"""A grammar's packed mask over logits."""

import torch
from torch import Tensor


def apply_bitmask_(logits: Tensor, bitmask: Tensor, *, vocab_size: int) -> None:
    """Logits [n, V] become -inf where their id's bit is 0; columns past `vocab_size` are left.

    Args:
        bitmask: [n, ceil(vocab_size / 32)] int32; bit v % 32 of word v // 32 allows id v. A row of
            -1 (all bits) allows everything.
    """
    ids = torch.arange(vocab_size, device=logits.device)
    allowed = (bitmask[:, ids // 32] >> (ids % 32)) & 1
    logits[:, :vocab_size].masked_fill_(allowed == 0, -torch.inf)
