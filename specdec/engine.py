"""The engine: requests in, committed tokens out, one `step()` at a time."""

import logging
from collections import deque
from typing import NamedTuple

import torch

from specdec.cache import BlockPool, blocks_for
from specdec.errors import ConfigError, RequestError
from specdec.models.batch import NULL_BLOCK, Draft, Target
from specdec.penalties import check_penalties
from specdec.runner import Outcome, Runner
from specdec.schedule import Limits, Request, Requests, Sequence, check_plan
from specdec.state import FinishReason, Plan, new_state
from specdec.step import Model, Stages
from specdec.values import CHECKS
from specdec.verify import traits_of

logger = logging.getLogger(__name__)


class Round(NamedTuple):
    """One decode step of one request, after trimming."""

    drafted: int
    accepted: int
    committed: int


class Output(NamedTuple):
    """What one step gave one request."""

    request_id: int
    token_ids: tuple[int, ...]
    round: Round | None  # None for the step that ends a prefill: its token is not a verify round
    finish_reason: str | None


class Flight(NamedTuple):
    """A step that was launched; its outcome is read later."""

    sequences: tuple[tuple[Sequence, int, bool], ...]  # and its slot, and if this is a verify round
    num_logits: tuple[int, ...]
    outcome: Outcome


class Engine:
    """Owns State, caches and queues; used from one thread.

    Args:
        stages: the four bound stages.
        limits: sizes reserved now; nothing grows later.
        draft_sampling: as `propose` was bound; "sample" reserves the [S, K, V_draft] buffer of
            draft logits when the verify rule wants draft probabilities.
        penalties: serve requests with penalties; reserves counts [S, V] of 4 bytes each.
        kernels: "torch" or "triton".
        graphs: as in `Runner`; needs Triton on a GPU.
        overlap: launch a step before the last one's outcome is read, so that the device never
            waits for the host. A step's outputs then come with the next call of `step`.

    Raises:
        ConfigError: when the sizes cannot serve even one request, or graphs cannot be captured.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        stages: Stages,
        limits: Limits,
        *,
        eos_token_ids: tuple[int, ...],
        draft_sampling: str = "greedy",
        penalties: bool = False,
        kernels: str = "torch",
        graphs: bool = False,
        overlap: bool = False,
    ):
        self.stages, self.limits, self.overlap = stages, limits, overlap
        per_request = limits.max_model_len + limits.max_draft_tokens
        if blocks_for(per_request, limits.block_size) > limits.num_blocks - 1:
            raise ConfigError(
                f"{limits.num_blocks} cache blocks of {limits.block_size} do not hold one request "
                f"of {per_request} tokens; raise num_blocks or lower the model length"
            )
        if limits.max_num_batched_tokens < limits.max_draft_tokens + 1:
            raise ConfigError(
                f"schedule.max_num_batched_tokens={limits.max_num_batched_tokens} is below the "
                f"{limits.max_draft_tokens + 1} rows of one verify round; raise it"
            )
        if draft is not None and draft.aux_layers:
            target = _with_streams(target, draft)
        weight = target.lm_head
        wants_q = traits_of(stages.verify).wants_draft_probs and draft_sampling == "sample"
        state = new_state(
            limits.num_slots,
            limits.max_model_len,
            limits.max_draft_tokens,
            limits.block_size,
            eos_token_ids,
            draft.logits_size if draft is not None and wants_q else 0,
            weight.dtype,
            weight.device,
            counted_vocab_size=target.vocab_size if penalties else 0,
        )
        shape = limits.cache_shape
        self.state, self.target = state, Model(target, target.new_cache(shape))
        self.draft = None if draft is None else Model(draft, draft.new_cache(shape))
        models = self.target, self.draft
        self.runner = Runner(state, *models, stages, limits, kernels=kernels, graphs=graphs)
        self.pool = BlockPool(limits.num_blocks)
        self.free_slots = list(range(limits.max_num_seqs))[::-1]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._flight: Flight | None = None
        self._next_id = 0
        self._warned_of_length = False

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self._flight)

    def check(self, request: Request) -> None:
        """Raises RequestError for an empty prompt, one as long as the context, unknown ids, numbers
        that are out of range, or penalties that are not reserved for."""
        length, limit = len(request.prompt_ids), self.limits.max_model_len
        if length == 0:
            raise RequestError("the prompt has no tokens; give at least one")
        if length >= limit:
            raise RequestError(
                f"the prompt has {length} tokens and the context holds {limit}; shorten the prompt"
            )
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens={request.max_tokens} must be at least 1")
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            value, (is_valid, wanted) = getattr(request, name), CHECKS[f"sampling.{name}"]
            if not is_valid(value):
                raise RequestError(f"{name}={value} must be {wanted}")
        vocab_size = self.target.model.vocab_size
        worst = max(request.prompt_ids, key=lambda t: t if t >= 0 else vocab_size - t)
        if not 0 <= worst < vocab_size:
            raise RequestError(f"prompt token id {worst} is outside the vocabulary of {vocab_size}")
        check_penalties(request, counted=self.state.token_counts.shape[1] > 0)

    def add(self, request: Request) -> int:
        """Queue a request. Raises RequestError as `check`."""
        self.check(request)
        request_id = self._next_id
        self._next_id += 1
        max_len = min(len(request.prompt_ids) + request.max_tokens, self.limits.max_model_len)
        self._warn_of_length_(max_len)
        self.waiting.append(Sequence(request_id, request, max_len, list(request.prompt_ids)))
        return request_id

    def _warn_of_length_(self, max_len: int) -> None:
        """Say once that drafts get worse past the positions that the head was made for."""
        if self.draft is None or self._warned_of_length:
            return
        reach = self.draft.model.max_position
        if max_len > reach:
            self._warned_of_length = True
            logger.warning(
                "a request may reach %d tokens and the draft head was made for %d; what it drafts "
                "past them is verified like any draft but may be accepted less often",
                max_len,
                reach,
            )

    def abort(self, request_id: int) -> None:
        """Drop a request; its slot and blocks serve the next plan. Unknown ids are ignored."""
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id)
        for sequence in [s for s in self.running if s.request_id == request_id]:
            self._release_(sequence)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Plan and launch a step, and read one back: this one, or with `overlap` the last one.

        Where a plan preempts, the step in flight is only read, and the next call plans anew.

        Raises:
            ConfigError: the schedule's plan does not fit the books, which are left as they were.
        """
        plan = self._plan()
        if plan.preempted and self._flight:  # whose tokens are in flight cannot give up its slot
            return self._land_()
        flight = self._launch_(plan)
        if self.overlap:
            outputs = self._land_()
            self._flight = flight
        else:
            self._flight = flight
            outputs = self._land_()
        return outputs

    def _plan(self) -> Plan:
        requests = Requests(self.running, self.waiting, self.free_slots, self.pool.free)
        plan = self.stages.schedule(requests, self.limits)
        check_plan(plan, requests, self.limits)
        return plan

    def _launch_(self, plan: Plan) -> Flight | None:
        self._book_(plan)
        if not plan.slots:
            return None
        by_slot = {s.slot: s for s in self.running}
        sequences = tuple((by_slot[s], s, by_slot[s].is_decoding) for s in plan.slots)
        outcome = self.runner.launch_(plan)
        self._expect_(plan)
        return Flight(sequences, plan.num_logits, outcome)

    def _book_(self, plan: Plan) -> None:
        """Carry a plan that `check_plan` passed out in the host's books."""
        for admission in plan.admissions:
            sequence = self.waiting.popleft()
            sequence.slot = admission.slot
            sequence.num_prefill = len(sequence.token_ids)
            self.free_slots.pop()
            self.running.append(sequence)
        by_slot = {s.slot: s for s in self.running}
        blocks = self.pool.take_(len(plan.new_blocks))
        for (slot, _, _), block in zip(plan.new_blocks, blocks, strict=True):
            by_slot[slot].blocks.append(block)
        # the youngest first, so that the oldest is at the head of the queue
        for sequence in [s for s in reversed(self.running) if s.slot in plan.preempted]:
            self._release_(sequence)
            sequence.num_computed = sequence.num_drafts = 0
            self.waiting.appendleft(sequence)
            self.num_preemptions += 1

    def _scrub_(self, sequence: Sequence) -> None:
        """Zero a failed request's blocks: a mask hides stale values, but 0 * NaN is NaN."""
        for model in filter(None, (self.target, self.draft)):
            for tensor in (*model.cache.keys, *model.cache.values):
                tensor[[NULL_BLOCK, *sequence.blocks]] = 0

    def _release_(self, sequence: Sequence) -> None:
        self.pool.release_(sequence.blocks)
        self.free_slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.blocks, sequence.slot, sequence.num_unread = [], -1, 0

    def _expect_(self, plan: Plan) -> None:
        """Book what the launched step will bring: exactly for prefill chunks, else at most."""
        by_slot = {s.slot: s for s in self.running}
        for slot, rows, num_logits in zip(
            plan.slots, plan.query_lens, plan.num_logits, strict=True
        ):
            sequence = by_slot[slot]
            if num_logits:
                sequence.num_unread += num_logits
                sequence.num_computed = sequence.num_tokens - 1
                sequence.num_drafts = plan.num_draft_tokens
            else:
                sequence.num_computed += rows

    def _land_(self) -> list[Output]:
        """Read the step in flight; requests that were dropped since are passed over."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        outputs = []
        landed = zip(flight.sequences, flight.num_logits, flight.outcome.read(), strict=False)
        for (sequence, slot, is_round), num_logits, row in landed:
            if not num_logits or sequence.slot != slot:
                continue
            kept, accepted, drafted, computed, reason, num_drafts = row[-6:]
            tokens = tuple(row[:kept])
            sequence.token_ids.extend(tokens)
            sequence.num_unread -= num_logits
            if sequence.num_unread:
                sequence.num_computed = sequence.num_tokens - 1
            else:
                sequence.num_computed, sequence.num_drafts = computed, num_drafts
            finish = None if reason == 0 else FinishReason(reason).name.lower()
            if finish == "error":
                self._scrub_(sequence)
            if finish:
                self._release_(sequence)
            verified = Round(drafted, accepted, kept) if is_round else None
            outputs.append(Output(sequence.request_id, tokens, verified, finish))
        return outputs


def _with_streams(target: Target, draft: Draft) -> Target:
    if target.capture is None:
        raise ConfigError(
            "the draft head reads auxiliary layers, which this target does not give; "
            "use another head"
        )
    return target.capture(draft.aux_layers)
