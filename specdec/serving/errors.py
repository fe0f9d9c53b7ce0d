"""OpenAI's error body, for every way in which a request can fail."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from specdec.errors import RequestError

TYPES = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error"}
INTERNAL = "the server failed while it handled this request; its log has the details"
NOT_FINITE = "the model gave values that are not finite for this request"
MAX_SHOWN = 60  # characters of a refused value in a message


class BadRequest(RequestError):
    """A request that is answered with an error and never reaches the engine.

    Args:
        param: the field at fault, as `messages[0].content`.
    """

    def __init__(
        self, message: str, param: str | None, *, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    clean = message.encode("utf-8", "replace").decode()  # half of a surrogate pair is not UTF-8
    return {"error": {"message": clean, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(status, message, param, code), status, headers)


def refusal(error: BadRequest) -> JSONResponse:
    return error_response(error.status, str(error), error.param, error.code)


def from_validation(error: RequestValidationError, content_type: str | None) -> BadRequest:
    """The first thing that is wrong with a body, with the field named.

    Args:
        content_type: the request's header; None without one.
    """
    first: Mapping[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not valid JSON: {first['ctx']['error']}", None)
    param = _path(first["loc"][1:])
    if not param:
        return BadRequest(_no_object(first["input"], content_type), None)
    if first["type"] == "missing":
        return BadRequest(f"{param} is missing", param)
    said = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return BadRequest(f"{param}={_shown(first['input'])} {said}", param)


def _no_object(body: Any, content_type: str | None) -> str:
    """What keeps a body from being a JSON object; bytes are one that was not read as JSON."""
    if isinstance(body, bytes):
        sent = "is missing" if content_type is None else f"is {_shown(content_type)}"
        return f"the header Content-Type {sent}; send application/json"
    what = "is empty or null" if body is None else f"is {_shown(body)}"
    return f"the body {what}; it must be a JSON object"


def _path(location: Sequence[str | int]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
