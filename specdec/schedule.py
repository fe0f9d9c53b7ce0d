"""The scheduler: which rows run in the next step. Host code; it reads no device tensor.

There is no prefill phase and no decode phase: a request's `num_computed_tokens` catches up with its
prompt + output + drafts, within a token budget (seed text, section 9.1).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import ge
from typing import NamedTuple

import torch

from specdec.cache import blocks_for
from specdec.errors import ConfigError
from specdec.models.batch import CacheShape
from specdec.rectangles import length_class
from specdec.state import GREEDY_EPSILON, Admission, Plan


class Limits(NamedTuple):
    """Sizes fixed when the engine is built."""

    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # rows a step
    max_model_len: int  # prompt + output of one request
    block_size: int
    num_blocks: int
    max_draft_tokens: int  # K_max: lookahead slots of every request

    @property
    def num_slots(self) -> int:
        """Rows of State: one a request, and the one of padding requests."""
        return self.max_num_seqs + 1

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_slots=self.num_slots,
            window=self.max_draft_tokens + 1,
        )


@dataclass(frozen=True)
class Request:
    """What a caller asks for; all that follows `temperature` is neutral as it stands, to `seed`.

    `repetition_penalty` counts the prompt and the output, the other two the output alone.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    @cached_property  # as the others, asked at every step
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @cached_property
    def has_filters(self) -> bool:
        """Whether filters change what is drawn; they never do at temperature 0."""
        filters = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return filters and not self.is_greedy

    @cached_property
    def has_penalties(self) -> bool:
        outputs = self.presence_penalty != 0 or self.frequency_penalty != 0
        return self.repetition_penalty != 1 or outputs


@dataclass(eq=False)
class Sequence:
    """The host's view of a request; the engine alone changes it.

    While a step of it is in flight, `num_unread`, `num_computed` and `num_drafts` are what they
    will be at most, and the device's own counts may be lower.
    """

    request_id: int
    request: Request
    max_len: int
    token_ids: list[int]
    num_unread: int = 0  # tokens that steps in flight may commit
    num_computed: int = 0
    num_prefill: int = 0  # rows before decoding: prompt, and output from before a preemption
    num_drafts: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unread

    @property
    def is_decoding(self) -> bool:
        """Whether the next step is a verify round, with or without drafts."""
        return self.num_computed >= self.num_prefill

    @property
    def num_pending(self) -> int:
        """Rows that would bring the cache up to prompt + output + drafts."""
        return self.num_tokens + self.num_drafts - self.num_computed

    @property
    def will_have_ended(self) -> bool:
        """A step in flight commits its last token: every one commits a token at least."""
        return bool(self.num_unread) and len(self.token_ids) + 1 >= self.max_len


class Requests(NamedTuple):
    """What the scheduler may look at."""

    running: Seq[Sequence]  # oldest first
    waiting: Seq[Sequence]  # in order of arrival
    free_slots: Seq[int]  # taken from the end
    free_blocks: Seq[int]  # taken from the end


def schedule(
    requests: Requests,
    limits: Limits,
    *,
    num_draft_tokens: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Plan:
    """Plan one step: decoding rows first, then running prefills, then new requests.

    A request gets blocks for its rows plus K lookahead slots. When none are left, the youngest
    running request is preempted (its drafts are dropped, its tokens recomputed later) and the
    starved one waits a step. A decoding request runs with all of its K + 1 rows or not at all.

    Returns:
        A Plan; empty `slots` means that nothing can run.
    """
    budget = max_num_batched_tokens
    blocks_taken = 0
    scheduled: list[tuple[Sequence, int, int]] = []  # (sequence, slot, rows)
    admissions: list[Admission] = []
    new_blocks: list[tuple[int, int, int]] = []
    preempted: set[int] = set()

    def reserve(sequence: Sequence, slot: int, rows: int) -> bool:
        nonlocal blocks_taken, budget
        last = min(sequence.num_computed + rows, sequence.max_len) + num_draft_tokens
        missing = blocks_for(last, limits.block_size) - len(sequence.blocks)
        if missing > 0:
            if missing > len(requests.free_blocks) - blocks_taken:
                return False
            for i in range(missing):
                block = requests.free_blocks[-1 - blocks_taken - i]
                new_blocks.append((slot, len(sequence.blocks) + i, block))
            blocks_taken += missing
        scheduled.append((sequence, slot, rows))
        budget -= rows
        return True

    for sequence in sorted(requests.running, key=lambda s: not s.is_decoding):
        pending = sequence.num_pending
        rows = min(pending, budget)
        whole = rows == pending or not sequence.num_drafts
        if rows <= 0 or not whole or sequence.will_have_ended or sequence.slot in preempted:
            continue
        if not reserve(sequence, sequence.slot, rows):
            busy = {slot for _, slot, _ in scheduled} | preempted
            victims = [s.slot for s in requests.running[1:] if s.slot not in busy]
            preempted.update(victims[-1:])

    for sequence in requests.waiting if not preempted else ():
        num_running = len(requests.running) + len(admissions)
        rows = min(sequence.num_pending, budget)
        if rows <= 0 or num_running >= min(max_num_seqs, limits.max_num_seqs):
            break
        slot = requests.free_slots[-1 - len(admissions)]
        if not reserve(sequence, slot, rows):
            break
        admissions.append(_admission(sequence, slot))

    scheduled.sort(key=lambda x: (length_class(x[2]), x[0].num_tokens))
    return Plan(
        admissions=tuple(admissions),
        slots=tuple(slot for _, slot, _ in scheduled),
        query_lens=tuple(rows for _, _, rows in scheduled),
        seq_lens=tuple(s.num_computed + n + num_draft_tokens for s, _, n in scheduled),
        num_logits=tuple(s.num_drafts + 1 if n == s.num_pending else 0 for s, _, n in scheduled),
        new_blocks=tuple(new_blocks),
        preempted=tuple(sorted(preempted)),
        num_draft_tokens=num_draft_tokens,
        all_greedy=all(s.request.is_greedy for s, _, _ in scheduled),
        filters=any(s.request.has_filters for s, _, _ in scheduled),
        penalties=any(s.request.has_penalties for s, _, _ in scheduled),
    )


def check_plan(plan: Plan, requests: Requests, limits: Limits) -> None:
    """Raises ConfigError where a plan names slots, blocks or drafts that there is no room for, or
    hides tokens that its rows see.

    Slots and blocks are taken from the ends of the free lists, in order; a slot that runs is held
    or admitted, and not preempted.
    """
    if not 0 <= plan.num_draft_tokens <= limits.max_draft_tokens:
        raise ConfigError(
            f"the schedule asks for K={plan.num_draft_tokens} drafts, and there are "
            f"{limits.max_draft_tokens} lookahead slots; raise propose.num_draft_tokens"
        )
    admitted = [admission.slot for admission in plan.admissions]
    blocks = [block for _, _, block in plan.new_blocks]
    for what, asked, free in (
        ("slots", admitted, requests.free_slots),
        ("blocks", blocks, requests.free_blocks),
    ):
        offered = list(free[max(0, len(free) - len(asked)) :][::-1])
        if asked != offered:
            raise ConfigError(f"the schedule takes the {what} {asked}; the free ones are {offered}")
    if len(admitted) > len(requests.waiting):
        raise ConfigError(
            f"the schedule admits {len(admitted)} of {len(requests.waiting)} requests"
        )
    scheduled = {*plan.slots, -1}  # -1: of those that are admitted
    candidates = (*requests.running, *islice(requests.waiting, len(admitted)))
    if not plan.penalties and any(
        s.request.has_penalties for s in candidates if s.slot in scheduled
    ):
        raise ConfigError(
            "the schedule runs a request with penalties; its Plan needs penalties=True"
        )
    running = {sequence.slot for sequence in requests.running}
    held = {*running, *admitted} - {*plan.preempted}
    used = {*plan.slots, *(slot for slot, _, _ in plan.new_blocks)}
    if not used <= held or not {*plan.preempted} <= running:
        raise ConfigError(
            f"the schedule runs slots {sorted(used)} and preempts {list(plan.preempted)}; "
            f"held are {sorted(held)}"
        )
    computed = {s.slot: s.num_computed for s in requests.running}  # 0 in what is admitted
    seen = [
        computed.get(slot, 0) + rows + plan.num_draft_tokens
        for slot, rows in zip(plan.slots, plan.query_lens, strict=False)
    ]
    if len(plan.seq_lens) < len(seen) or not all(map(ge, plan.seq_lens, seen)):
        raise ConfigError(
            f"the schedule says that its requests see {list(plan.seq_lens)} tokens; with K="
            f"{plan.num_draft_tokens} drafts they see {seen}"
        )


def _admission(sequence: Sequence, slot: int) -> Admission:
    request = sequence.request
    return Admission(
        slot=slot,
        token_ids=torch.tensor(sequence.token_ids, dtype=torch.int64),
        prompt_len=len(request.prompt_ids),
        max_len=sequence.max_len,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
    )
