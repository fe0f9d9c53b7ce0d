"""After verification: what stands of the verified tokens, and the new counts."""

from specdec.models.batch import Batch
from specdec.state import Committed, State, Verification
from specdec.step import ops


def postprocess(state: State, batch: Batch, verification: Verification) -> Committed:
    """Trim by end-of-sequence, length and errors; advance the counts.

    A request ends at its first committed EOS (a drafted EOS that was rejected has no effect), at
    `max_len`, or with ERROR at a token drawn from a row without a distribution, which is not kept.
    `num_computed_tokens` becomes committed length - 1: rows of rejected drafts no longer count
    (seed text, section 9.2). A prefill chunk commits nothing, and a request that is not running
    keeps what it has.
    """
    return ops().trim(
        verification.token_ids,
        verification.rows,
        verification.num_accepted,
        verification.num_sampled,
        request_slots=batch.request_slots,
        query_start=batch.query_start,
        seq_lens=batch.seq_lens,
        eos_token_ids=state.eos_token_ids,
        ignore_eos=state.ignore_eos,
        max_len=state.max_len,
        num_tokens=state.num_tokens,
        num_computed_tokens=state.num_computed_tokens,
        num_drafts=state.num_drafts,
        finish_reason=state.finish_reason,
    )
