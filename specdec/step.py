"""One step on the device: ordinary functions over records, no host synchronisation inside.

prepare -> target.forward -> process_logits -> verify -> postprocess -> propose -> commit_
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.runtime import uses_triton
from specdec.keys import Keys
from specdec.models.batch import NULL_BLOCK, AttentionGroup, Batch, Draft, Target
from specdec.sampling import process_logits
from specdec.state import (
    PLACEHOLDER_TOKEN_ID,
    Committed,
    DraftDist,
    Drafts,
    Plan,
    State,
    Verification,
    is_running,
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
    groups: tuple[tuple[int, int, int], ...]  # as in Plan; none where kernels need no rectangles
    num_draft_tokens: int
    all_greedy: bool
    filters: bool


def step_shape(plan: Plan) -> StepShape:
    """The shape of a plan; of a ragged one the kernels know no longest query but the row count."""
    longest, num_rows = max(plan.query_lens), sum(plan.query_lens)
    if uses_triton() and longest > min(plan.query_lens):
        longest = num_rows
    return StepShape(
        num_requests=len(plan.slots),
        num_rows=num_rows,
        num_logits=sum(plan.num_logits),
        max_query_len=longest,
        groups=() if uses_triton() else plan.groups,
        num_draft_tokens=plan.num_draft_tokens,
        all_greedy=plan.all_greedy,
        filters=plan.filters,
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
    batch = prepare(state, rows, shape, block_size)
    out = target.model.forward(batch, target.cache)
    logits = target.model.logits(out.hidden[batch.logits_indices])
    dist = process_logits(logits, state, batch, vocab_size=target.model.vocab_size)
    verification = stages.verify(dist, pending_drafts(state, batch, draft), keys(state, batch))
    if not isinstance(verification, Verification):
        raise ConfigError(
            f"the verify stage returned {type(verification).__name__}, not a "
            "specdec.state.Verification; `specdec.verify.complete` makes one"
        )
    committed = stages.postprocess(state, batch, verification)
    drafts = stages.propose(
        state, batch, committed, out, draft, num_draft_tokens=shape.num_draft_tokens
    )
    num_drafts = commit_(state, batch, committed, drafts)
    counts = (
        committed.num_committed,
        committed.num_accepted,
        committed.num_drafted,
        committed.num_computed_tokens,
        committed.finish_reason,
        num_drafts,
    )
    return torch.cat([committed.token_ids, torch.stack(counts, dim=1)], dim=1)


def prepare(state: State, rows: Tensor, shape: StepShape, block_size: int) -> Batch:
    """Exact ids, positions and slots of the planned rows, from the device's own counts.

    The plan's row counts are upper bounds: rows past a request's real tokens become padding, and
    so do all rows of a request that ended in a step which the host has not read yet.
    """
    device = state.token_ids.device
    num_requests, num_rows, num_logits = shape[:3]
    slots, query_lens, logits_lens = rows
    query_start = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0))
    cu_num_logits = torch.nn.functional.pad(logits_lens.cumsum(0), (1, 0))

    request = torch.repeat_interleave(
        torch.arange(num_requests, device=device), query_lens, output_size=num_rows
    )
    offset = torch.arange(num_rows, device=device) - query_start[request]
    row_slots = slots[request]
    num_tokens, computed = state.num_tokens[slots], state.num_computed_tokens[slots]
    total = torch.where(is_running(state, slots), num_tokens + state.num_drafts[slots], 0)
    positions = computed[request] + offset
    valid = positions < total[request]
    positions = torch.where(valid, positions, 0)
    draft_index = positions - num_tokens[request]
    input_ids = state.token_ids[row_slots, positions]
    if state.draft_token_ids.shape[1]:
        drafts = state.draft_token_ids[row_slots, draft_index.clamp(min=0)].clamp(min=0)
        input_ids = torch.where(draft_index >= 0, drafts, input_ids)
    input_ids = torch.where(valid, input_ids, 0)
    block_tables = state.block_tables[slots]
    slot_mapping = slot_of(block_tables, request, positions, block_size)

    logits_request = torch.repeat_interleave(
        torch.arange(num_requests, device=device), logits_lens, output_size=num_logits
    )
    logits_offset = torch.arange(num_logits, device=device) - cu_num_logits[logits_request]
    first_row = query_start[:-1] + num_tokens - 1 - computed
    last_row = query_start[1:] - 1
    logits_indices = first_row[logits_request] + logits_offset

    return Batch(
        input_ids=input_ids,
        positions=positions,
        query_start=query_start,
        seq_lens=torch.minimum(computed + query_lens, total),
        slot_mapping=torch.where(valid, slot_mapping, NULL_BLOCK * block_size),
        block_tables=block_tables,
        logits_indices=torch.minimum(logits_indices, last_row[logits_request]),
        cu_num_logits=cu_num_logits,
        request_slots=slots,
        row_valid=valid,
        groups=_groups(shape, query_start, query_lens, positions, block_tables, block_size),
        block_size=block_size,
        max_query_len=shape.max_query_len,
        all_greedy=shape.all_greedy,
        filters=shape.filters,
    )


def slot_of(block_tables: Tensor, request: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Cache slot [T] of each position, through its request's row of block_tables [R, M]."""
    block = block_tables[request, torch.div(positions, block_size, rounding_mode="floor")]
    return block * block_size + positions % block_size


def _groups(
    shape: StepShape,
    query_start: Tensor,
    query_lens: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> tuple[AttentionGroup, ...]:
    groups = []
    bounds = [0, *accumulate(size for size, _, _ in shape.groups)]
    for (_, max_query, max_seq), start, end in zip(shape.groups, bounds, bounds[1:], strict=False):
        column = torch.arange(max_query, device=positions.device)[None, :]
        column = torch.where(column < query_lens[start:end, None], column, 0)
        query_index = query_start[start:end, None] + column
        tables = block_tables[start:end, : -(-max_seq // block_size)]
        groups.append(attention_group(query_index, positions, tables, block_size))
    return tuple(groups)


def attention_group(
    query_index: Tensor, positions: Tensor, block_tables: Tensor, block_size: int
) -> AttentionGroup:
    """Causal visibility of each query's own sequence; position 0 is always visible, so that padding
    rows attend to something finite."""
    key_positions = torch.arange(block_tables.shape[1] * block_size, device=positions.device)
    mask = key_positions[None, None, :] <= positions[query_index][:, :, None]
    return AttentionGroup(query_index, block_tables, mask)


def pending_drafts(state: State, batch: Batch, draft: Model[Draft] | None) -> Drafts:
    """The drafts that this step's rows verify, with q where it was kept."""
    slots = batch.request_slots
    q = None
    if draft is not None and state.q_logits.shape[2]:
        q = DraftDist(
            logits=state.q_logits,
            max=state.q_max,
            cutoff=state.q_cutoff,
            lse=state.q_lse,
            inv_temperature=state.q_inv_temperature,
            slots=slots,
            vocab_map=draft.model.vocab_map,
        )
    return Drafts(
        token_ids=state.draft_token_ids[slots],
        is_delta=state.draft_is_delta[slots],
        num_drafts=state.num_drafts[slots],
        q=q,
    )


def keys(state: State, batch: Batch) -> Keys:
    """A round starts at the position of its first draft, the committed length."""
    slots = batch.request_slots
    return Keys(state.seeds[slots], state.num_tokens[slots])


def commit_(state: State, batch: Batch, committed: Committed, drafts: Drafts) -> Tensor:
    """Write the step's outcome; drafts that could not be committed before `max_len` are dropped.

    Returns:
        Drafts now pending [R].

    Raises:
        ConfigError: there are more drafts than State has room for.
    """
    proposed, k = drafts.token_ids.shape[1], state.draft_token_ids.shape[1]
    if proposed > k:
        raise ConfigError(f"the proposer made {proposed} drafts a request, and K is at most {k}")
    slots = batch.request_slots
    width = committed.token_ids.shape[1]
    column = state.num_tokens[slots, None] + torch.arange(width, device=slots.device)
    kept = committed.token_ids >= 0
    old = state.token_ids[slots[:, None], column]
    state.token_ids[slots[:, None], column] = torch.where(kept, committed.token_ids, old)
    state.num_tokens[slots] = committed.num_tokens
    state.num_computed_tokens[slots] = committed.num_computed_tokens
    state.finish_reason[slots] = committed.finish_reason

    room = state.max_len[slots] - committed.num_tokens - 1
    going = (committed.num_committed > 0) & (committed.finish_reason == 0)
    num_drafts = torch.minimum(drafts.num_drafts.clamp(max=proposed), room).clamp(min=0) * going
    pad = k - proposed
    token_ids = torch.nn.functional.pad(drafts.token_ids, (0, pad), value=PLACEHOLDER_TOKEN_ID)
    pending = torch.arange(k, device=slots.device)[None, :] < num_drafts[:, None]
    state.draft_token_ids[slots] = torch.where(pending, token_ids, PLACEHOLDER_TOKEN_ID)
    state.draft_is_delta[slots] = torch.nn.functional.pad(drafts.is_delta, (0, pad), value=True)
    state.num_drafts[slots] = num_drafts
    return num_drafts
