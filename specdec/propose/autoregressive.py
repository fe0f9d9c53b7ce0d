"""The chain that Eagle and MTP heads share (seed text, section 7)."""

import torch
from torch import Tensor

from specdec.keys import Keys
from specdec.models.batch import Batch, TargetOutput
from specdec.propose import next_token_ids, no_drafts, proposer
from specdec.sampling import DraftSample, sample_draft
from specdec.state import GREEDY_EPSILON, Committed, Drafts, State
from specdec.step import Model, attention_group, slot_of


@proposer(uses_draft=True)
def autoregressive(
    state: State,
    batch: Batch,
    committed: Committed,
    out: TargetOutput,
    draft: Model,
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

    Args:
        draft_sampling: "greedy" (one-hot proposals), "sample" (from q, kept for the rule) or
            "shared" (argmax under the target's own Gumbel noise, for `gumbel` with shared noise).
        temperature: of q; None takes the request's own. Requests at temperature 0 draft greedily.
    """
    model, cache = draft
    ids = next_token_ids(state, batch, committed)
    drafted = model.forward(ids, model.features(out), batch, cache, 0)
    num_requests = len(batch.request_slots)
    if num_draft_tokens == 0:
        return no_drafts(num_requests, ids.device)

    slots = batch.request_slots
    temperatures = state.temperature[slots]
    if temperature is not None:
        sampled = temperatures >= GREEDY_EPSILON
        temperatures = torch.where(sampled, temperature, temperatures)
    round_keys = Keys(state.seeds[slots], committed.num_tokens)

    rows = committed.last_rows
    for_logits, recycle = drafted.for_logits[rows], drafted.recycle[rows]
    positions = batch.positions[rows]
    token_ids, is_delta = [], []
    for step in range(num_draft_tokens):
        if step:
            positions = positions + 1
            step_batch = _single_rows(batch, positions)
            drafted = model.forward(token_ids[-1], recycle, step_batch, cache, step)
            for_logits, recycle = drafted.for_logits, drafted.recycle
        sample = sample_draft(
            model.logits(for_logits, step),
            temperature=temperatures,
            top_k=state.top_k[slots],
            top_p=state.top_p[slots],
            min_p=state.min_p[slots],
            keys=round_keys,
            offset=step,
            mode=draft_sampling,
            vocab_size=model.vocab_size,
            vocab_map=model.vocab_map,
            filters=batch.filters,
            all_greedy=batch.all_greedy,
        )
        if draft_sampling == "sample" and state.q_logits.shape[2]:
            write_draft_dist_(state, slots, step, sample)
        token_ids.append(sample.token_ids)
        is_delta.append(sample.is_delta)
    return Drafts(
        token_ids=torch.stack(token_ids, dim=1),
        is_delta=torch.stack(is_delta, dim=1),
        num_drafts=torch.full((num_requests,), num_draft_tokens, device=ids.device),
    )


def write_draft_dist_(state: State, slots: Tensor, step: int, sample: DraftSample) -> None:
    """Keep q of one draft step in State's reserved buffer."""
    state.q_logits[slots, step] = sample.logits
    state.q_max[slots, step] = sample.max
    state.q_cutoff[slots, step] = sample.cutoff
    state.q_lse[slots, step] = sample.lse
    state.q_inv_temperature[slots] = sample.inv_temperature


def _single_rows(batch: Batch, positions: Tensor) -> Batch:
    """A batch of one row a request at the given positions [R], in lookahead slots."""
    request = torch.arange(len(positions), device=positions.device)
    first = batch.groups[0]
    block_size = first.mask.shape[2] // first.block_tables.shape[1]
    groups, start = [], 0
    for group in batch.groups:
        end = start + len(group.query_index)
        index = request[start:end, None]
        groups.append(attention_group(index, positions, group.block_tables, block_size))
        start = end
    return Batch(
        input_ids=positions,
        positions=positions,
        query_start=torch.arange(len(positions) + 1, device=positions.device),
        seq_lens=positions + 1,
        slot_mapping=slot_of(batch.block_tables, request, positions, block_size),
        block_tables=batch.block_tables,
        logits_indices=request,
        cu_num_logits=torch.arange(len(positions) + 1, device=positions.device),
        request_slots=batch.request_slots,
        row_valid=torch.ones_like(positions, dtype=torch.bool),
        groups=tuple(groups),
    )
