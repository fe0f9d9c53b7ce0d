"""OpenAI's answer bodies: whole, and as server-sent events."""

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specdec.serving.choices import Choice, ChoiceFailed, Delta
from specdec.serving.errors import INTERNAL, error_body
from specdec.serving.metrics import request_acceptance
from specdec.serving.protocol import Job

NO_CACHE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

log = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """How one of the generating endpoints writes its answers."""

    id_prefix: str
    object: str
    chunk_object: str
    choice: Callable[[str], dict[str, Any]]  # of the whole text
    delta: Callable[[str, bool], dict[str, Any]]  # of a piece, and whether it is the first


def _chat_delta(text: str, is_first: bool) -> dict[str, Any]:
    role = {"role": "assistant"} if is_first else {}
    return {"delta": {**role, "content": text} if text or is_first else {}}


COMPLETIONS = Endpoint(
    id_prefix="cmpl",
    object="text_completion",
    chunk_object="text_completion",
    choice=lambda text: {"text": text},
    delta=lambda text, is_first: {"text": text},
)
CHAT = Endpoint(
    id_prefix="chatcmpl",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    choice=lambda text: {"message": {"role": "assistant", "content": text}},
    delta=_chat_delta,
)


class EventStream(StreamingResponse):
    """Server-sent events; a client that leaves closes the generator, wherever it stands.

    Starlette cancels what it awaits, which misses a generator that waits for its reader.
    """

    def __init__(self, events: AsyncGenerator[str, None]):
        super().__init__(events, media_type="text/event-stream", headers=NO_CACHE)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def whole_body(
    endpoint: Endpoint,
    model: str,
    job: Job,
    choices: Sequence[Choice],
    deltas: AsyncGenerator[Delta, None],
) -> dict[str, Any]:
    """The answer once every choice has ended. Raises ChoiceFailed as `deltas` does."""
    texts = [""] * len(choices)
    async with aclosing(deltas):
        async for delta in deltas:
            texts[delta.index] += delta.text
    return {
        **_head(endpoint, endpoint.object, model),
        "choices": [
            _choice(index, choice.finish_reason, endpoint.choice(text))
            for index, (choice, text) in enumerate(zip(choices, texts, strict=True))
        ],
        **_account(job, choices),
    }


async def event_stream(
    endpoint: Endpoint,
    model: str,
    job: Job,
    choices: Sequence[Choice],
    deltas: AsyncGenerator[Delta, None],
) -> AsyncGenerator[str, None]:
    """One event for what each engine output adds, usage if it is asked for, then [DONE].

    A choice ends with an event of its own, which has a finish reason and no text, as OpenAI's do:
    some clients read no further than the reason. A failure ends the stream with an event that holds
    an error body.
    """
    head = _head(endpoint, endpoint.chunk_object, model)
    seen: set[int] = set()

    def event(index: int, text: str, finish_reason: str | None) -> str:
        content = endpoint.delta(text, index not in seen)
        seen.add(index)
        return _event({**head, "choices": [_choice(index, finish_reason, content)]})

    try:
        async with aclosing(deltas):
            async for index, text, finish_reason in deltas:
                if text or (finish_reason and index not in seen):  # the first has a chat's role
                    yield event(index, text, None)
                if finish_reason:
                    yield event(index, "", finish_reason)
        if job.include_usage:
            yield _event({**head, "choices": [], **_account(job, choices)})
    except ChoiceFailed as error:
        yield _event(error_body(error.status, str(error)))
    except Exception:
        log.exception("a stream failed")
        yield _event(error_body(500, INTERNAL))
    yield "data: [DONE]\n\n"


def _head(endpoint: Endpoint, kind: str, model: str) -> dict[str, Any]:
    identity = f"{endpoint.id_prefix}-{uuid.uuid4().hex}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": model}


def _choice(index: int, finish_reason: str | None, content: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}


def _account(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    """Usage and acceptance of a finished job."""
    completion = sum(choice.num_tokens for choice in choices)
    rounds = [r for choice in choices for r in choice.rounds]
    return {
        "usage": {
            "prompt_tokens": job.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": job.num_prompt_tokens + completion,
        },
        "metrics": {"speculative_decoding": request_acceptance(rounds)},
    }


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
