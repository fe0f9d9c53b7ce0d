"""One step on the device: ordinary functions over records, no host synchronisation inside.

prepare -> target.forward -> process_logits -> verify -> postprocess -> propose -> commit_
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.runtime import uses_triton
from specdec.kernels.step import reference
from specdec.keys import Keys
from specdec.models.batch import Batch, Draft, Target
from specdec.rectangles import Rectangle, attention_groups, rectangles
from specdec.sampling import process_logits
from specdec.state import (
    Committed,
    DraftDist,
    Drafts,
    Plan,
    State,
    Verification,
)


class Stages(NamedTuple):
    """The four stages, each a function bound to its configuration."""

    schedule: Callable
    verify: Callable
    postprocess: Callable
    propose: Callable


M = TypeVar("M", Target, Draft)


class Model(NamedTuple, Generic[M]):
    """A target or a draft with the cache it writes."""

    model: M
    cache: Any


class StepShape(NamedTuple):
    """What the host knows of a step: every size, and no value. One CUDA graph serves one shape."""

    num_requests: int
    num_rows: int
    num_logits: int
    max_query_len: int
    rectangles: tuple[Rectangle, ...]  # of the torch attention
    num_draft_tokens: int
    all_greedy: bool
    filters: bool
    penalties: bool


def step_shape(plan: Plan) -> StepShape:
    """The shape of a plan.

    Only of verify rounds of one length do the kernels know the longest query. Of all else they know
    the row count, so that equal lengths by chance are no shape of their own.
    """
    longest, num_rows = max(plan.query_lens), sum(plan.query_lens)
    if uses_triton() and (longest > min(plan.query_lens) or plan.query_lens != plan.num_logits):
        longest = num_rows
    return StepShape(
        num_requests=len(plan.slots),
        num_rows=num_rows,
        num_logits=sum(plan.num_logits),
        max_query_len=longest,
        rectangles=() if uses_triton() else rectangles(plan.query_lens, plan.seq_lens),
        num_draft_tokens=plan.num_draft_tokens,
        all_greedy=plan.all_greedy,
        filters=plan.filters,
        penalties=plan.penalties,
    )


def plan_rows(plan: Plan) -> Tensor:
    """[3, R] int64 on the host: slots, rows and logits rows of each request."""
    return torch.tensor([plan.slots, plan.query_lens, plan.num_logits], dtype=torch.int64)


def decode_step(
    state: State,
    rows: Tensor,
    shape: StepShape,
    target: Model[Target],
    draft: Model[Draft] | None,
    stages: Stages,
    block_size: int,
) -> Tensor:
    """Run a plan's rows through the target, verify, and propose the next drafts.

    Args:
        rows: `plan_rows` on the device.

    Returns:
        [R, W + 6] int64: the W columns of `Committed.token_ids`, then num_committed, num_accepted,
        num_drafted, num_computed_tokens, finish_reason and the drafts now pending.
    """
    batch, pending, keys = prepare(state, rows, shape, draft, block_size)
    out = target.model.forward(batch, target.cache)
    logits = target.model.logits(out.hidden[batch.logits_indices])
    dist = process_logits(logits, state, batch, vocab_size=target.model.vocab_size)
    verification = stages.verify(dist, pending, keys)
    if not isinstance(verification, Verification):
        raise ConfigError(
            f"the verify stage returned {type(verification).__name__}, not a "
            "specdec.state.Verification; `specdec.verify.complete` makes one"
        )
    committed = stages.postprocess(state, batch, verification)
    drafts = stages.propose(
        state, batch, committed, out, draft, num_draft_tokens=shape.num_draft_tokens
    )
    return commit_(state, batch, committed, drafts)


class Prepared(NamedTuple):
    """What a step knows before its target runs."""

    batch: Batch
    drafts: Drafts  # that its rows verify
    keys: Keys  # a round starts at the position of its first draft, the committed length


def prepare(
    state: State,
    rows: Tensor,
    shape: StepShape,
    draft: Model[Draft] | None,
    block_size: int,
) -> Prepared:
    """Exact ids, positions and slots of the planned rows, from the device's own counts.

    The plan's row counts are upper bounds: rows past a request's real tokens become padding, and
    so do all rows of a request that ended in a step which the host has not read yet.
    """
    made = ops().prepare_step(
        rows,
        num_rows=shape.num_rows,
        num_logits=shape.num_logits,
        max_query_len=shape.max_query_len,
        block_size=block_size,
        token_ids=state.token_ids,
        num_tokens=state.num_tokens,
        num_computed_tokens=state.num_computed_tokens,
        finish_reason=state.finish_reason,
        draft_token_ids=state.draft_token_ids,
        draft_is_delta=state.draft_is_delta,
        num_drafts=state.num_drafts,
        seeds=state.seeds,
        block_tables=state.block_tables,
    )
    batch = Batch(
        input_ids=made.input_ids,
        positions=made.positions,
        query_start=made.query_start,
        seq_lens=made.seq_lens,
        slot_mapping=made.slot_mapping,
        block_tables=made.block_tables,
        logits_indices=made.logits_indices,
        cu_num_logits=made.cu_num_logits,
        request_slots=rows[0],
        row_valid=made.row_valid,
        groups=attention_groups(
            shape.rectangles, made.query_start, made.positions, made.block_tables, block_size
        ),
        block_size=block_size,
        max_query_len=shape.max_query_len,
        all_greedy=shape.all_greedy,
        filters=shape.filters,
        penalties=shape.penalties,
    )
    wants_q = draft is not None and state.q_logits.shape[2]
    q = draft_dist(state, batch, draft.model) if wants_q else None
    drafts = Drafts(made.draft_token_ids, made.draft_is_delta, made.num_drafts, q)
    return Prepared(batch, drafts, Keys(made.seeds, made.num_tokens))


def ops() -> Any:
    """The functions of `kernels/step`, on what ops run on here."""
    if uses_triton():
        from specdec.kernels.step import kernel

        return kernel
    return reference


def draft_dist(state: State, batch: Batch, draft: Draft) -> DraftDist:
    """State's buffers of q for the requests of a batch; without columns where no rule reads q."""
    return DraftDist(
        logits=state.q_logits,
        max=state.q_max,
        cutoff=state.q_cutoff,
        lse=state.q_lse,
        inv_temperature=state.q_inv_temperature,
        slots=batch.request_slots,
        vocab_map=draft.vocab_map,
    )


def commit_(state: State, batch: Batch, committed: Committed, drafts: Drafts) -> Tensor:
    """Write the step's outcome; drafts that could not be committed before `max_len` are dropped.

    Returns:
        As `decode_step`.

    Raises:
        ConfigError: there are more drafts than State has room for.
    """
    proposed, k = drafts.token_ids.shape[1], state.draft_token_ids.shape[1]
    if proposed > k:
        raise ConfigError(f"the proposer made {proposed} drafts a request, and K is at most {k}")
    return ops().post_update_(
        committed,
        drafts.token_ids,
        drafts.is_delta,
        drafts.num_drafts,
        request_slots=batch.request_slots,
        token_ids=state.token_ids,
        max_len=state.max_len,
        num_tokens=state.num_tokens,
        num_computed_tokens=state.num_computed_tokens,
        finish_reason=state.finish_reason,
        draft_token_ids=state.draft_token_ids,
        draft_is_delta=state.draft_is_delta,
        num_drafts=state.num_drafts,
        output_bin_counts=state.token_counts if batch.penalties else None,
    )
