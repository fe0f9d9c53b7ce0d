"""Penalties on repetition: what a request may ask for, and the logits that they change.

Row j of a request counts its prompt, its output and its drafts 0 .. j - 1, which is what plain
decoding would have counted there: a verify rule keeps its promise about penalised logits too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.errors import RequestError
from specdec.kernels.runtime import uses_triton
from specdec.values import PENALTIES

if TYPE_CHECKING:
    from specdec.models.batch import Batch
    from specdec.schedule import Request
    from specdec.state import State


def check_penalties(request: Request, *, counted: bool) -> None:
    """Raises RequestError for a penalty out of range, or any where tokens are not `counted`."""
    for name, (off, low, high) in PENALTIES.items():
        value = getattr(request, name)
        if not low <= value <= high:
            raise RequestError(f"{name}={value} must be from {low:g} to {high:g}")
        if value != off and not counted:
            raise RequestError(
                f"{name}={value} needs counts of tokens, which this engine does not keep; build it "
                "with penalties=true"
            )


def penalised(logits: Tensor, state: State, batch: Batch, *, vocab_size: int) -> Tensor:
    """A step's logits [N, V] under its requests' penalties, in fp32: in bf16 a logit near 20 has
    steps of 0.125, and a smaller penalty would be lost."""
    if uses_triton():
        from specdec.kernels.penalties.kernel import apply_penalties_
    else:
        from specdec.kernels.penalties.reference import apply_penalties_
    out = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    apply_penalties_(
        out,
        state.token_counts,
        state.draft_token_ids,
        batch.request_slots,
        batch.cu_num_logits,
        state.repetition_penalty,
        state.presence_penalty,
        state.frequency_penalty,
        vocab_size=vocab_size,
    )
    return out
