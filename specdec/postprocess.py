"""After verification: what stands of the verified tokens, and the new counts."""

import torch

from specdec.models.batch import Batch
from specdec.state import INVALID_TOKEN_ID, Committed, FinishReason, State, Verification, is_running


def postprocess(state: State, batch: Batch, verification: Verification) -> Committed:
    """Trim by end-of-sequence, length and errors; advance the counts.

    A request ends at its first committed EOS (a drafted EOS that was rejected has no effect), at
    `max_len`, or with ERROR at a token drawn from a row without a distribution, which is not kept.
    `num_computed_tokens` becomes committed length - 1: rows of rejected drafts no longer count
    (seed text, section 9.2). A prefill chunk commits nothing, and a request that is not running
    keeps what it has.
    """
    slots = batch.request_slots
    running = is_running(state, slots)
    num_sampled = torch.where(running, verification.num_sampled, 0)
    tokens = verification.token_ids
    width = tokens.shape[1]
    index = torch.arange(width, device=tokens.device)
    sampled = index[None, :] < num_sampled[:, None]
    is_eos = torch.isin(tokens, state.eos_token_ids) & ~state.ignore_eos[slots, None] & sampled
    is_invalid = (tokens == INVALID_TOKEN_ID) & sampled

    def first(mask: torch.Tensor) -> torch.Tensor:  # [R] index of the first True, else width
        return torch.where(mask, index, width).amin(dim=1)

    num_tokens = state.num_tokens[slots]
    remaining = state.max_len[slots] - num_tokens
    end, bad = first(is_eos), first(is_invalid)
    kept = torch.minimum(torch.minimum(num_sampled, end + 1), remaining)
    kept = torch.minimum(kept, bad)
    reason = torch.where(num_tokens + kept >= state.max_len[slots], int(FinishReason.LENGTH), 0)
    reason = torch.where(end < kept, int(FinishReason.STOP), reason)
    reason = torch.where((bad == kept) & (bad < width), int(FinishReason.ERROR), reason)

    started = num_sampled > 0
    last_rows = verification.rows.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]
    before = state.num_computed_tokens[slots]
    computed = torch.where(running, batch.seq_lens, before)
    chunk_rows = batch.query_start[:-1] + (computed - before - 1).clamp(min=0)
    return Committed(
        token_ids=torch.where(index[None, :] < kept[:, None], tokens, -1),
        num_committed=kept,
        num_accepted=torch.minimum(verification.num_accepted, kept),
        num_drafted=torch.where(started, state.num_drafts[slots], 0),
        num_tokens=num_tokens + kept,
        num_computed_tokens=torch.where(started, num_tokens + kept - 1, computed),
        last_rows=torch.where(started, last_rows, chunk_rows),
        finish_reason=torch.where(started, reason, state.finish_reason[slots]),
    )
