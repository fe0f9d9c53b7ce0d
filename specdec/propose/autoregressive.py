"""The chain that Eagle and MTP heads share (seed text, section 7)."""

from dataclasses import replace

import torch
from torch import Tensor

from specdec.draft_sampling import sample_draft_
from specdec.kernels.draft_rows.reference import DraftRows
from specdec.kernels.row_stats.reference import row_requests
from specdec.keys import Keys
from specdec.models.batch import Batch, Draft, TargetOutput
from specdec.propose import draft_ops, next_token_ids, no_drafts, proposer
from specdec.rectangles import attention_group
from specdec.state import GREEDY_EPSILON, Committed, Drafts, State
from specdec.step import Model, draft_dist


@proposer(uses_draft=True)
def autoregressive(
    state: State,
    batch: Batch,
    committed: Committed,
    out: TargetOutput,
    draft: Model[Draft],
    *,
    num_draft_tokens: int,
    draft_sampling: str = "greedy",
    temperature: float | None = None,
) -> Drafts:
    """Draft K tokens one after the other with a head that recycles its own hidden state.

    The first pass runs over every row of the step with the target's true hidden states, which
    replaces the keys and values that earlier drafting made from approximate ones; it runs with
    K = 0 too, so that the head's cache has no holes. Row (h_P, token P+1) sits at position P and
    drafts token P+2.

    Where n layers take turns, layer i's row P is (what layer i-1 gave at P, token P+1+i): see
    `ingest` and `prepare_eagle_decode` for which rows run when.

    Args:
        draft_sampling: "greedy" (one-hot proposals), "sample" (from q, kept for the rule) or
            "shared" (argmax under the target's own Gumbel noise, for `gumbel` with shared noise).
        temperature: of q; None takes the request's own. Requests at temperature 0 draft greedily.

    q has no penalties: any q is lossless, and they would need counts of the drafts as they are
    made. A request with strong penalties has fewer drafts accepted for it.
    """
    model, cache = draft
    ids, positions = next_token_ids(state, batch, committed)
    last = committed.last_rows
    for_logits, ingested = ingest(draft, ids, model.features(out), batch, last)
    num_requests = len(batch.request_slots)
    if num_draft_tokens == 0:
        return no_drafts(num_requests, ids.device)

    slots = batch.request_slots
    temperatures = state.temperature[slots]
    if temperature is not None:
        sampled = temperatures >= GREEDY_EPSILON
        temperatures = torch.where(sampled, temperature, temperatures)
    round_keys = Keys(state.seeds[slots], committed.num_tokens)

    steps = draft_ops().prepare_eagle_decode(
        positions,
        batch.block_tables,
        num_draft_tokens=num_draft_tokens,
        num_depths=model.num_depths,
        block_size=batch.block_size,
    )
    filters = [temperatures] * 3  # which nobody reads
    if batch.filters:
        filters = [state.top_k[slots], state.top_p[slots], state.min_p[slots]]
    q = draft_dist(state, batch, model)
    token_ids, is_delta = [], []
    recycled = [ingested[0]]  # of the row behind each drafted token, [R, H]
    rows = ingested[0][:, None]  # of the last pass's rows, [R, m, H]
    for step in range(num_draft_tokens):
        if step:
            step_batch = _next_batch(batch, steps[step - 1])
            hidden = _next_hidden(rows, recycled, ingested, step)
            count, hidden = hidden.shape[1], hidden.flatten(0, 1)
            if model.num_depths > 1:  # else every row is valid
                hidden = torch.where(step_batch.row_valid[:, None], hidden, 0)
            step_ids = token_ids[-1]
            if count > 1:
                step_ids = torch.stack(token_ids[-count:], dim=1).flatten()
            drafted = model.forward(step_ids, hidden, step_batch, cache, step)
            rows = drafted.recycle.view(num_requests, -1, drafted.recycle.shape[-1])
            for_logits = drafted.for_logits.view(num_requests, -1, drafted.for_logits.shape[-1])
            for_logits = for_logits[:, -1]
            recycled.append(rows[:, -1])
        ids, delta = sample_draft_(
            q,
            model.logits(for_logits, step),
            temperature=temperatures,
            top_k=filters[0],
            top_p=filters[1],
            min_p=filters[2],
            vocab_size=model.vocab_size,
            keys=round_keys,
            offset=step,
            mode=draft_sampling,
            filters=batch.filters,
            all_greedy=batch.all_greedy,
        )
        token_ids.append(ids)
        is_delta.append(delta)
    return Drafts(
        token_ids=torch.stack(token_ids, dim=1),
        is_delta=torch.stack(is_delta, dim=1),
        num_drafts=torch.full((num_requests,), num_draft_tokens, device=ids.device),
    )


def ingest(
    draft: Model[Draft], ids: Tensor, hidden: Tensor, batch: Batch, last_rows: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Every layer over the newly committed rows, so that no layer's cache has holes.

    With N committed tokens the target has hidden states up to position N - 2, so the rows of layer
    i that hold nothing but committed tokens end at N - 2 - i. Layer i therefore runs over this
    step's rows moved back by i positions: a row's id is the same for all layers, all of them are
    final, and together with earlier steps they cover every position from 0 on. The hidden state of
    a moved row is what the layer before gave one batch row earlier; the first row's comes from the
    step before, through `cache.carry`. Rows that drafting wrote at N - 1 - i .. N - 2 are exactly
    those that the next step's moved rows write again.

    Args:
        ids: [T] target ids, shifted left by one (`next_token_ids`).
        hidden: [T, H] the target's features.
        last_rows: [R] batch row of position N - 2 of each request.

    Returns:
        The first layer's input to the logits at the last rows [R, H], and for each layer what it
        recycles at its last final row [R, H].
    """
    model, cache = draft
    out = model.forward(ids, hidden, batch, cache, 0)
    for_logits, last = out.for_logits[last_rows], [out.recycle[last_rows]]
    if model.num_depths == 1:
        return for_logits, last
    slots, request = batch.request_slots, row_requests(batch.query_start, len(ids))
    is_first = torch.arange(len(ids), device=ids.device) == batch.query_start[request]
    for depth in range(1, model.num_depths):
        carried = cache.carry[depth - 1, slots]
        moved = _moved_back(batch, depth)
        hidden = torch.where(is_first[:, None], carried[request], out.recycle.roll(1, 0))
        hidden = torch.where(moved.row_valid[:, None], hidden, 0)
        cache.carry[depth - 1, slots] = last[-1]
        out = model.forward(ids, hidden, moved, cache, depth)
        last.append(out.recycle[last_rows])
    return for_logits, last


def _next_hidden(rows: Tensor, recycled: list[Tensor], ingested: list[Tensor], step: int) -> Tensor:
    """Hidden states [R, m, H] of the rows that draft step `step` >= 1 runs (see `_next_batch`)."""
    num_depths = len(ingested)
    depth = step % num_depths
    if depth == 0:  # the first layer again: a row a draft, each behind the one that made it
        return torch.stack(recycled[-num_depths:], dim=1)
    if step > depth:  # a later turn: the layer before ran over the same rows
        return rows
    if depth == 1:
        return ingested[0][:, None]
    return torch.cat((ingested[depth - 1][:, None], rows), dim=1)


def _next_batch(batch: Batch, rows: DraftRows) -> Batch:
    """The rows of a draft step after the first (`prepare_eagle_decode`), m a request."""
    count = len(rows.positions) // len(rows.seq_lens)
    groups, start = [], 0
    for group in batch.groups:
        end = start + len(group.query_index) * count
        numbers = torch.arange(start, end, device=rows.positions.device).view(-1, count)
        groups.append(
            attention_group(numbers, rows.positions, group.block_tables, batch.block_size)
        )
        start = end
    return replace(
        batch,
        input_ids=rows.positions,
        max_query_len=count,
        groups=tuple(groups),
        **rows._asdict(),
    )


def _moved_back(batch: Batch, depth: int) -> Batch:
    """The batch with every row `depth` positions earlier; rows before position 0 are invalid."""
    positions, slot_mapping, valid, seq_lens = draft_ops().moved_back(
        batch.positions,
        batch.row_valid,
        batch.seq_lens,
        batch.block_tables,
        query_start=batch.query_start,
        max_query_len=batch.max_query_len,
        depth=depth,
        block_size=batch.block_size,
    )
    return replace(
        batch,
        input_ids=positions,
        positions=positions,
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        row_valid=valid,
        groups=tuple(
            attention_group(group.query_index, positions, group.block_tables, batch.block_size)
            for group in batch.groups
        ),
    )
