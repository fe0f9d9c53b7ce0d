"""The records of a step. All are frozen and born complete; a tensor's contents change only in
`apply_plan_`, `commit_` and named cache writes.

`Verification` and `Committed` are records of the ops that make them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from specdec.kernels.penalties.reference import reset_counts_
from specdec.kernels.step.reference import Committed as Committed
from specdec.kernels.verification.reference import Verification as Verification
from specdec.models.batch import NULL_BLOCK, VocabMap

PLACEHOLDER_TOKEN_ID = -1  # no draft here; always rejected without a read
GREEDY_EPSILON = 1e-5  # temperatures below are greedy everywhere
INVALID_TOKEN_ID = -2  # drawn from a row that holds no distribution (all NaN)


class FinishReason(IntEnum):
    RUNNING = 0
    STOP = 1  # an end-of-sequence token was committed
    LENGTH = 2  # max_tokens or the context's end
    ERROR = 3  # the target's row was not finite
    ABORT = 4


@dataclass(frozen=True)
class State:
    """One row a slot, S slots, on the device. L: longest sequence, K: most drafts, M: blocks.

    The last slot is no request's: padding requests of a step have it. It never runs.
    """

    token_ids: Tensor  # [S, L + K + 1] int64, prompt then committed output; the tail is scratch
    prompt_len: Tensor  # [S] int64
    max_len: Tensor  # [S] int64, the request ends when num_tokens reaches it
    num_tokens: Tensor  # [S] int64, prompt + committed output; the last one is not yet computed
    num_computed_tokens: Tensor  # [S] int64, rows whose keys and values are in the cache
    draft_token_ids: Tensor  # [S, K] int64, pending drafts, padded with PLACEHOLDER_TOKEN_ID
    draft_is_delta: Tensor  # [S, K] bool, True where the proposal is one-hot
    num_drafts: Tensor  # [S] int64
    q_logits: Tensor  # [S, K, V_draft], written by propose; V_draft = 0 when no rule wants q
    q_max: Tensor  # [S, K] fp32
    q_cutoff: Tensor  # [S, K] fp32
    q_lse: Tensor  # [S, K] fp32
    q_inv_temperature: Tensor  # [S] fp32
    temperature: Tensor  # [S] fp32
    top_k: Tensor  # [S] int64, 0: off
    top_p: Tensor  # [S] fp32
    min_p: Tensor  # [S] fp32
    repetition_penalty: Tensor  # [S] fp32, 1: off
    presence_penalty: Tensor  # [S] fp32, 0: off
    frequency_penalty: Tensor  # [S] fp32, 0: off
    token_counts: Tensor  # [S, V] int32 packed (`kernels.penalties`), of requests with penalties
    # right while they run; V = 0 in an engine without penalties
    seeds: Tensor  # [S] int64
    ignore_eos: Tensor  # [S] bool
    block_tables: Tensor  # [S, M] int64
    finish_reason: Tensor  # [S] int64, FinishReason
    generation: Tensor  # [S] int64, counts the requests that held the slot
    eos_token_ids: Tensor  # [E] int64, the model's end-of-sequence ids


@dataclass(frozen=True)
class DraftDist:
    """q, exactly the distributions that the drafts were sampled from, in the draft's vocabulary.

    Scaled logit x = (logit - max) * inv_temperature; kept where x >= cutoff; q = exp(x - lse).
    """

    logits: Tensor  # [S, K, V_draft]
    max: Tensor  # [S, K] fp32
    cutoff: Tensor  # [S, K] fp32
    lse: Tensor  # [S, K] fp32
    inv_temperature: Tensor  # [S] fp32
    slots: Tensor  # [R] int64, row of each request in the buffers above
    vocab_map: VocabMap | None


@dataclass(frozen=True)
class Drafts:
    """Pending proposals of R requests."""

    token_ids: Tensor  # [R, K] int64 target ids, padded with PLACEHOLDER_TOKEN_ID
    is_delta: Tensor  # [R, K] bool
    num_drafts: Tensor  # [R] int64
    q: DraftDist | None = None  # None: every proposal is one-hot
    parents: Tensor | None = None  # [R, K] tree parents; None: a chain


@dataclass(frozen=True)
class TargetDist:
    """The target's distribution at N rows, as logits plus what turns them into probabilities.

    Scaled logit x = (logit - max) * inv_temperature over real ids; kept where x >= cutoff;
    p = exp(x - lse). A greedy row is one-hot at `argmax`. A row with no finite maximum is invalid.
    """

    logits: Tensor  # [N, V] as produced, or penalised
    max: Tensor  # [N] fp32
    inv_temperature: Tensor  # [N] fp32
    cutoff: Tensor  # [N] fp32, -inf keeps all
    lse: Tensor  # [N] fp32, over kept ids
    greedy: Tensor  # [N] bool
    argmax: Tensor  # [N] int64, lowest id on ties; INVALID_TOKEN_ID on an invalid row
    cu_num_logits: Tensor  # [R + 1] int64; request r owns rows cu[r] .. cu[r + 1] - 1
    batch_rows: Tensor  # [N] int64, the batch row behind each
    vocab_size: int  # ids at or past it have probability 0
    all_greedy: bool = False  # the host's promise that every row is greedy
    block_mass: Tensor | None = None  # [N, C] fp32, sum of exp(x) over each block's kept ids
    # (`kernels.row_stats`), so that a draw reads one block and not the row; None if all are greedy

    def probs(self, rows: Tensor | None = None) -> Tensor:
        """Probabilities [n, V] fp32 of the given rows ([n]; all when None): the definition."""
        from specdec.sampling import target_probs

        return target_probs(self, rows)


@dataclass(frozen=True)
class Admission:
    """A request entering a slot: what apply_plan_ writes in its row."""

    slot: int
    token_ids: Tensor  # [n] int64 on the host: prompt, and output so far after a preemption
    prompt_len: int
    max_len: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    ignore_eos: bool


@dataclass(frozen=True)
class Plan:
    """What the host decided for one step; it was made without reading a device tensor."""

    admissions: tuple[Admission, ...]
    slots: tuple[int, ...]  # R slots, short queries first
    query_lens: tuple[int, ...]  # rows reserved for each request, an upper bound
    seq_lens: tuple[int, ...]  # tokens that its rows and then its drafts' see, an upper bound
    num_logits: tuple[int, ...]  # logits rows reserved for each, 0 for a non-final prefill chunk
    new_blocks: tuple[tuple[int, int, int], ...]  # (slot, column, block id)
    preempted: tuple[int, ...]  # slots whose request goes back to the queue
    num_draft_tokens: int  # drafts to propose after this step
    all_greedy: bool  # no request of the step samples
    filters: bool  # some request uses top-k, top-p or min-p
    penalties: bool = False  # some request has a repetition, presence or frequency penalty


def new_state(
    num_slots: int,
    max_len: int,
    max_draft_tokens: int,
    block_size: int,
    eos_token_ids: tuple[int, ...],
    draft_vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    counted_vocab_size: int = 0,
) -> State:
    """An empty State. `draft_vocab_size` is 0 when no rule asks for draft probabilities, and
    `counted_vocab_size` when no request may have penalties.

    One token stands in every slot, so that positions of a slot that never ran are in range.
    """

    def ints(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=device)

    def floats(*shape: int, value: float = 0.0) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=device)

    slots, k = num_slots, max_draft_tokens
    columns = -(-(max_len + 2 * k + 1) // block_size)
    return State(
        token_ids=ints(slots, max_len + k + 1),
        prompt_len=ints(slots),
        max_len=ints(slots, value=1),
        num_tokens=ints(slots, value=1),
        num_computed_tokens=ints(slots),
        draft_token_ids=ints(slots, k, value=PLACEHOLDER_TOKEN_ID),
        draft_is_delta=torch.ones(slots, k, dtype=torch.bool, device=device),
        num_drafts=ints(slots),
        q_logits=torch.zeros(slots, k, draft_vocab_size, dtype=dtype, device=device),
        q_max=floats(slots, k),
        q_cutoff=floats(slots, k, value=float("-inf")),
        q_lse=floats(slots, k),
        q_inv_temperature=floats(slots, value=1.0),
        temperature=floats(slots),
        top_k=ints(slots),
        top_p=floats(slots, value=1.0),
        min_p=floats(slots),
        repetition_penalty=floats(slots, value=1.0),
        presence_penalty=floats(slots),
        frequency_penalty=floats(slots),
        token_counts=torch.zeros(slots, counted_vocab_size, dtype=torch.int32, device=device),
        seeds=ints(slots),
        ignore_eos=torch.zeros(slots, dtype=torch.bool, device=device),
        block_tables=ints(slots, columns, value=NULL_BLOCK),
        finish_reason=ints(slots, value=int(FinishReason.ABORT)),
        generation=ints(slots),
        eos_token_ids=torch.tensor(eos_token_ids, dtype=torch.int64, device=device),
    )


def apply_plan_(state: State, plan: Plan) -> None:
    """Write what the plan brings into State: admitted requests, new blocks, preemptions."""
    device = state.token_ids.device
    if plan.preempted:
        slots = upload(torch.tensor(plan.preempted), device)
        state.num_drafts[slots] = 0
        state.draft_token_ids[slots] = PLACEHOLDER_TOKEN_ID
    if plan.admissions:
        _admit_(state, plan)
    if plan.new_blocks:
        slots, columns, blocks = upload(torch.tensor(plan.new_blocks), device).unbind(1)
        state.block_tables[slots, columns] = blocks


def _admit_(state: State, plan: Plan) -> None:
    device = state.token_ids.device
    admitted = plan.admissions
    slots = upload(torch.tensor([a.slot for a in admitted]), device)
    lengths = [len(a.token_ids) for a in admitted]
    texts = torch.nn.utils.rnn.pad_sequence([a.token_ids for a in admitted], batch_first=True)
    ids = upload(texts, device)
    state.token_ids[slots, : ids.shape[1]] = ids
    integers = {
        "prompt_len": [a.prompt_len for a in admitted],
        "max_len": [a.max_len for a in admitted],
        "num_tokens": lengths,
        "top_k": [a.top_k for a in admitted],
        "seeds": [a.seed for a in admitted],
    }
    floats = {
        "temperature": [a.temperature for a in admitted],
        "top_p": [a.top_p for a in admitted],
        "min_p": [a.min_p for a in admitted],
        "repetition_penalty": [a.repetition_penalty for a in admitted],
        "presence_penalty": [a.presence_penalty for a in admitted],
        "frequency_penalty": [a.frequency_penalty for a in admitted],
    }
    for names, dtype in ((integers, torch.int64), (floats, torch.float32)):
        rows = upload(torch.tensor(list(names.values()), dtype=dtype), device)
        for name, row in zip(names, rows, strict=True):
            getattr(state, name)[slots] = row
    if state.token_counts.shape[1]:
        reset_counts_(
            state.token_counts, slots, ids, state.prompt_len[slots], state.num_tokens[slots]
        )
    state.ignore_eos[slots] = upload(torch.tensor([a.ignore_eos for a in admitted]), device)
    state.num_computed_tokens[slots] = 0
    state.num_drafts[slots] = 0
    state.finish_reason[slots] = int(FinishReason.RUNNING)
    state.generation[slots] += 1
    # what the slot's former request left would be read, though masked: another's NaN is one here
    state.block_tables[slots] = NULL_BLOCK


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor's copy on the device, which nothing waits for."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
