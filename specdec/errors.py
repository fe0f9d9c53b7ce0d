"""Errors that a user meets: one clear line that names the value and the fix."""

import difflib
from collections.abc import Iterable


class SpecdecError(Exception):
    """Base of every user-facing error; the message is folded onto one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


class ConfigError(SpecdecError, ValueError):
    """A key, a value or a combination of settings that cannot run."""


class CheckpointError(SpecdecError, ValueError):
    """A checkpoint that is absent, incomplete or does not fit the model."""


class RequestError(SpecdecError, ValueError):
    """A request that the engine cannot serve, such as a prompt longer than the context."""


class DataError(SpecdecError, ValueError):
    """A prompt or training file that is absent, empty or malformed."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Ends a message about an unknown `name` with the closest of `valid`; '' if none is close."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
