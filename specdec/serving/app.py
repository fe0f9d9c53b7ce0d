"""The HTTP application: OpenAI's endpoints, health and metrics."""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.errors import RequestError
from specdec.serving.choices import Choice, ChoiceFailed, run_choices
from specdec.serving.errors import (
    INTERNAL,
    BadRequest,
    error_response,
    from_validation,
    refusal,
)
from specdec.serving.metrics import ServerMetrics
from specdec.serving.protocol import (
    DEFAULT_MAX_TOKENS,
    ChatBody,
    CompletionBody,
    Defaults,
    Job,
    SamplingBody,
    TokenLimit,
    check_fields,
    make_job,
)
from specdec.serving.responses import (
    CHAT,
    COMPLETIONS,
    Endpoint,
    EventStream,
    event_stream,
    whole_body,
)
from specdec.serving.text import TextCodec
from specdec.serving.worker import EngineThread

OPEN_PATHS = ("/health",)  # reached without the API key
CLIENT_CLOSED_REQUEST = 499


class Served(NamedTuple):
    """The model behind a server."""

    name: str
    root: str  # where it was loaded from
    created: int  # seconds since the epoch
    defaults: Defaults


def create_app(
    served: Served,
    worker: EngineThread,
    codec: TextCodec,
    metrics: ServerMetrics,
    *,
    api_key: str | None = None,
) -> FastAPI:
    """The application around a worker, which it starts and stops with itself.

    Args:
        api_key: asked for on every path but /health; None: any key, or none, will do.
    """
    # One thread keeps long prompts off the event loop.
    tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)
        tokenizing.shutdown()

    app = FastAPI(title="specdec", lifespan=lifespan)
    if api_key is not None:
        app.add_middleware(RequireKey, key=api_key)
    _add_error_handlers_(app)

    async def tokenize(field: str, encode: Callable[[Any], tuple[int, ...]], text: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(tokenizing, encode, text)
        except RequestError as error:
            raise BadRequest(f"{field}: {error}", field) from error

    async def answer(request: Request, endpoint: Endpoint, job: Job) -> Response:
        choices = [Choice(codec.decode, job.stops) for _ in job.requests]
        parts = served.name, job, choices, run_choices(job, choices, worker, metrics)
        if job.stream:
            return EventStream(event_stream(endpoint, *parts))
        body = await _unless_gone(request, whole_body(endpoint, *parts))
        return Response(status_code=CLIENT_CLOSED_REQUEST) if body is None else JSONResponse(body)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if worker.is_alive else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {
                    "id": served.name,
                    "object": "model",
                    "created": served.created,
                    "owned_by": "specdec",
                    "root": served.root,
                    "max_model_len": served.defaults.limits.max_model_len,
                }
            ],
        }

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        _check(body, served)
        prompts = [
            await tokenize("prompt", codec.encode, prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        limit = TokenLimit("max_tokens", body.max_tokens, DEFAULT_MAX_TOKENS)
        job = make_job(body, prompts, "prompt", limit, served.defaults)
        return await answer(request, COMPLETIONS, job)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        _check(body, served)
        messages = [message.model_dump() for message in body.messages]
        ids = await tokenize("messages", codec.encode_chat, messages)
        limit = TokenLimit("max_tokens", body.max_tokens, None)
        if body.max_completion_tokens is not None:
            limit = TokenLimit("max_completion_tokens", body.max_completion_tokens, None)
        job = make_job(body, [ids], "messages", limit, served.defaults)
        return await answer(request, CHAT, job)

    return app


class RequireKey:
    """Answers 401 to whatever does not carry `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                message = "the API key is missing or wrong; send Authorization: Bearer KEY"
                headers = {"WWW-Authenticate": "Bearer"}
                refused = error_response(401, message, code="invalid_api_key", headers=headers)
                await refused(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _check(body: SamplingBody, served: Served) -> None:
    if body.model is not None and body.model != served.name:
        raise BadRequest(
            f"the model {body.model!r} does not exist here; this server has {served.name!r}",
            "model",
            status=404,
            code="model_not_found",
        )
    check_fields(body)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, or None if the client goes away first, which cancels it."""

    async def client_left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.create_task(work), asyncio.create_task(client_left())
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        left.cancel()


def _add_error_handlers_(app: FastAPI) -> None:
    @app.exception_handler(BadRequest)
    async def bad_request(request: Request, error: BadRequest) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> Response:
        return refusal(from_validation(error, request.headers.get("content-type")))

    @app.exception_handler(ChoiceFailed)
    async def failed(request: Request, error: ChoiceFailed) -> Response:
        return error_response(error.status, str(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        return error_response(500, INTERNAL)
