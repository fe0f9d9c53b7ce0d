"""Prompt-lookup drafts: what followed the same n-gram earlier in the request's own text."""

import torch

from specdec.models.batch import Batch, TargetOutput
from specdec.propose import proposer, texts_after
from specdec.state import PLACEHOLDER_TOKEN_ID, Committed, Drafts, State
from specdec.step import Model


@proposer(uses_draft=False)
def ngram(
    state: State,
    batch: Batch,
    committed: Committed,
    out: TargetOutput,
    draft: Model | None,
    *,
    num_draft_tokens: int,
    draft_sampling: str = "greedy",
    temperature: float | None = None,
    min_ngram: int = 2,
    max_ngram: int = 4,
) -> Drafts:
    """Find the longest suffix of `max_ngram` .. `min_ngram` tokens that occurs earlier, most recent
    occurrence first, and propose its continuation (prompt lookup decoding, apoorvumang 2023).

    Where the continuation reaches the text's end it goes on periodically, so a loop of period 2
    still yields K drafts. Proposals are one-hot; `draft_sampling` and `temperature` do not apply.
    """
    text = texts_after(state, batch, committed)
    lengths = committed.num_tokens[:, None]
    width = text.shape[1]
    columns = torch.arange(width, device=text.device)[None, :]
    found = torch.full_like(lengths, -1)  # [R, 1] index just past the earlier occurrence
    equal = torch.ones_like(text, dtype=torch.bool)
    for n in range(1, min(max_ngram, width) + 1):
        # does the window of n that ends before column c equal the text's suffix?
        suffix = text.gather(1, (lengths - n).clamp(min=0))
        equal &= text.roll(n, dims=1) == suffix
        if n >= min_ngram:
            inside = (columns >= n) & (columns < lengths) & (lengths > n)
            latest = torch.where(equal & inside, columns, -1).amax(dim=1, keepdim=True)
            found = torch.where(latest < 0, found, latest)
    period = (lengths - found).clamp(min=1)
    steps = torch.arange(num_draft_tokens, device=text.device)[None, :]
    token_ids = text.gather(1, (found + steps % period).clamp(0, width - 1))
    hit = found >= 0
    return Drafts(
        token_ids=torch.where(hit, token_ids, PLACEHOLDER_TOKEN_ID),
        is_delta=torch.ones_like(token_ids, dtype=torch.bool),
        num_drafts=torch.where(hit[:, 0], num_draft_tokens, 0),
    )
