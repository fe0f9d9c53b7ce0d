"""Plain decoding: no drafts, whatever `num_draft_tokens` says."""

from specdec.models.batch import Batch, TargetOutput
from specdec.propose import no_drafts, proposer
from specdec.state import Committed, Drafts, State
from specdec.step import Model


@proposer(uses_draft=False)
def none(
    state: State,
    batch: Batch,
    committed: Committed,
    out: TargetOutput,
    draft: Model | None,
    *,
    num_draft_tokens: int = 0,
    draft_sampling: str = "greedy",
    temperature: float | None = None,
) -> Drafts:
    """Propose nothing; every keyword is accepted so that configurations swap, and ignored."""
    return no_drafts(len(batch.request_slots), batch.request_slots.device)
