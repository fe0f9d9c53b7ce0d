"""A verification's record with another number of accepted drafts than the rule's own."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.verification.reference import Verification


def decide(
    wanted: Tensor | int,
    draft_token_ids: Tensor,
    num_drafts: Tensor,
    cu_num_logits: Tensor,
    batch_rows: Tensor,
    token_ids: Tensor,
    num_accepted: Tensor,
) -> Verification:
    """Accept `wanted` drafts of each request, or as many as can stand; the rule's own last token
    ends the round.

    Args:
        wanted: drafts to accept, [R] int64 or the same for all.
        draft_token_ids: [R, K] int64, padded with -1.
        num_drafts: [R] int64 drafts that are pending.
        cu_num_logits: [R + 1] int64; a request without rows decides nothing.
        batch_rows: [N] int64 batch row of each logits row.
        token_ids: [R, K + 1] int64, the rule's own tokens.
        num_accepted: [R] int64, how many drafts it accepted.
    """
    first, num_rows = cu_num_logits[:-1], cu_num_logits.diff()
    has_rows = num_rows > 0
    limit = torch.minimum(num_drafts, num_rows - 1).clamp(min=0)
    accepted = limit.clamp(max=wanted) if isinstance(wanted, int) else limit.minimum(wanted)
    stop = token_ids.gather(1, num_accepted[:, None])
    index = torch.arange(token_ids.shape[1], device=token_ids.device)[None, :]
    end = accepted[:, None]
    kept = torch.nn.functional.pad(draft_token_ids, (0, 1), value=-1)
    tokens = torch.where(index < end, kept, torch.where(index == end, stop, -1))
    line = (first[:, None] + torch.minimum(index, end)).clamp(max=len(batch_rows) - 1)
    return Verification(
        token_ids=torch.where(has_rows[:, None], tokens, -1),
        rows=batch_rows[line],
        num_accepted=accepted,
        num_sampled=torch.where(has_rows, accepted + 1, 0),
        num_rejected=torch.where(has_rows, num_drafts - accepted, 0),
    )
