"""Proposers: `propose(state, batch, committed, out, draft, *, num_draft_tokens, ...) -> Drafts`.

`committed` is not in State yet when a proposer runs. The engine passes the plan's
`num_draft_tokens`; drafts of finished or still prefilling requests are dropped by `commit_`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.runtime import uses_triton
from specdec.models.batch import Batch
from specdec.state import PLACEHOLDER_TOKEN_ID, Committed, Drafts, State


def proposer(*, uses_draft: bool) -> Callable[[Callable], Callable]:
    """Declares whether a proposer needs a draft model; the function itself is left as it is.

    A function that declares nothing gets the model where one is configured, else None.
    """

    def declare(function: Any) -> Any:
        function.uses_draft = uses_draft
        return function

    return declare


def no_drafts(num_requests: int, device: torch.device) -> Drafts:
    """Nothing proposed for any request (K = 0 columns)."""
    return Drafts(
        token_ids=torch.full((num_requests, 0), PLACEHOLDER_TOKEN_ID, device=device),
        is_delta=torch.ones((num_requests, 0), dtype=torch.bool, device=device),
        num_drafts=torch.zeros(num_requests, dtype=torch.int64, device=device),
    )


def texts_after(state: State, batch: Batch, committed: Committed) -> Tensor:
    """Token ids [R, L + K + 1] as they will stand after `commit_`; past num_tokens is scratch."""
    slots = batch.request_slots
    text = state.token_ids[slots]
    width = committed.token_ids.shape[1]
    column = state.num_tokens[slots, None] + torch.arange(width, device=slots.device)
    kept = committed.token_ids >= 0
    return text.scatter(1, column, torch.where(kept, committed.token_ids, text.gather(1, column)))


def next_token_ids(state: State, batch: Batch, committed: Committed) -> tuple[Tensor, Tensor]:
    """The token after each batch row [T], and the positions [R] of `committed.last_rows`.

    Ids are shifted left by one: the last real row of a request takes the newly committed token; at
    the end of a non-final prefill chunk it takes the known next prompt token. Rows of rejected
    drafts hold any valid id.
    """
    return draft_ops().prepare_eagle_inputs(
        committed,
        positions=batch.positions,
        query_start=batch.query_start,
        request_slots=batch.request_slots,
        max_query_len=batch.max_query_len,
        token_ids=state.token_ids,
        num_tokens=state.num_tokens,
    )


def draft_ops() -> Any:
    """The functions of `kernels/draft_rows`, on what ops run on here."""
    if uses_triton():
        from specdec.kernels.draft_rows import kernel

        return kernel
    from specdec.kernels.draft_rows import reference

    return reference
