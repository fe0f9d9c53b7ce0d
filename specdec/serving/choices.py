"""The choices of one HTTP request while they run: engine outputs in, text and counts out."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from specdec.engine import Output, Round
from specdec.serving.errors import INTERNAL, NOT_FINITE
from specdec.serving.metrics import ServerMetrics
from specdec.serving.protocol import Job
from specdec.serving.text import Detokenizer, StopStrings
from specdec.serving.worker import EngineThread, Event, Failure

Decode = Callable[[Sequence[int]], str]


class ChoiceFailed(Exception):
    """A choice that cannot be finished; the message is fit for the client."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Delta(NamedTuple):
    """What one engine output adds to a choice."""

    index: int
    text: str
    finish_reason: str | None  # stop | length


class Choice:
    """Text, tokens and verify rounds of one engine request, cut at stop strings."""

    def __init__(self, decode: Decode, stops: Sequence[str]):
        self._text = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self.num_tokens = 0  # with the end-of-sequence token, or the one that completes a stop
        self.rounds: list[Round] = []
        self.finish_reason: str | None = None

    def push_(self, output: Output) -> str:
        """Text that an output adds. What follows a stop string is not counted either."""
        pieces: list[str] = []
        kept, stopped = 0, False
        while kept < len(output.token_ids) and not stopped:
            token_id = output.token_ids[kept]
            kept += 1
            is_eos = output.finish_reason == "stop" and kept == len(output.token_ids)
            if not is_eos:  # it is no text, whether the tokenizer calls it special or not
                piece, stopped = self._stops.push_(self._text.push_(token_id))
                pieces.append(piece)
        if output.finish_reason and not stopped:
            piece, stopped = self._stops.push_(self._text.flush_())
            pieces += [piece, self._stops.flush_()]
        self.num_tokens += kept
        if output.round is not None:
            drafted, accepted, _ = output.round
            self.rounds.append(Round(drafted, min(accepted, kept), kept))
        self.finish_reason = "stop" if stopped else output.finish_reason
        return "".join(pieces)


async def run_choices(
    job: Job,
    choices: Sequence[Choice],
    worker: EngineThread,
    metrics: ServerMetrics,
) -> AsyncGenerator[Delta, None]:
    """Run a job's requests in the engine and yield what its outputs add to `choices`.

    Closed or cancelled early it aborts what still runs.

    Raises:
        ChoiceFailed: a request failed; the others are aborted.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def sink(index: int) -> Callable[[Event], None]:
        def send(event: Event) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        return send

    began = time.perf_counter()
    latest: dict[int, float] = {}  # time of each choice's last tokens
    tickets: dict[int, int] = {}  # of the choices that still run
    try:
        for index, request in enumerate(job.requests):
            tickets[index] = worker.submit(request, sink(index))
        while tickets:
            index, event = await events.get()
            if index not in tickets:
                continue  # a stop string ended it while the next step ran
            now = time.perf_counter()
            if isinstance(event, Failure) or event.finish_reason == "error":
                del tickets[index]
                metrics.record_end_("error", now - began)
                raise _failed(event)
            choice = choices[index]
            num_tokens = choice.num_tokens
            text = choice.push_(event)
            if index not in latest:
                metrics.record_first_token_(len(job.requests[index].prompt_ids), now - began)
            since = now - latest[index] if index in latest else None
            metrics.record_tokens_(choice.num_tokens - num_tokens, since)
            latest[index] = now
            if choice.finish_reason:
                ticket = tickets.pop(index)
                if not event.finish_reason:
                    worker.abort(ticket)  # a stop string; the engine does not know it
                metrics.record_end_(choice.finish_reason, now - began)
            yield Delta(index, text, choice.finish_reason)
    finally:
        for ticket in tickets.values():
            worker.abort(ticket)
            metrics.record_end_("abort", time.perf_counter() - began)


def _failed(event: Event) -> ChoiceFailed:
    if not isinstance(event, Failure):
        return ChoiceFailed(NOT_FINITE, 500)
    if event.refused is not None:
        return ChoiceFailed(event.refused, 400)
    return ChoiceFailed(INTERNAL, 500)
