"""Between text and token ids: prompts, chat templates, and output text as it comes.

Everything goes through the tokenizer's backend, whose calls change nothing and may overlap.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec.errors import RequestError

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not, or not yet, UTF-8

Message = Mapping[str, Any]


class TextCodec(NamedTuple):
    """What a server needs of a tokenizer."""

    encode: Callable[[str], tuple[int, ...]]  # with the model's own prefix, such as BOS
    encode_chat: Callable[[Sequence[Message]], tuple[int, ...]]
    decode: Callable[[Sequence[int]], str]  # special tokens left out


def text_codec(tokenizer: Any) -> TextCodec:
    """The codec of a `transformers` fast tokenizer.

    `encode` and `encode_chat` raise RequestError for text that is not Unicode, without a chat
    template, or which the template refuses.
    """
    from jinja2 import TemplateError

    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()

    def encode(text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds half of a surrogate pair at character {error.start}"
            ) from error
        return tuple(backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(messages: Sequence[Message]) -> tuple[int, ...]:
        if not tokenizer.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions")
        try:
            text = tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template refuses the messages: {error}") from error
        return encode(text, add_special_tokens=False)

    def decode(ids: Sequence[int]) -> str:
        return backend.decode(ids, skip_special_tokens=True)

    return TextCodec(encode, encode_chat, decode)


class Detokenizer:
    """Text of a growing id sequence, piece by piece; the pieces joined are its whole text.

    A character whose bytes are still incomplete is held back. Ids are decoded together with those
    of the last piece, since a decoder may treat the first id of a sequence differently; that
    window always starts where a piece ended, so never inside a character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._window: list[int] = []  # ids of the last piece, then those held back
        self._num_shown = 0  # ids of the last piece
        self._shown = ""  # their text

    def push_(self, token_id: int) -> str:
        """Text that is complete with this id, often one piece a token, sometimes ''."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._shown) or text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._shown) :]
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return piece

    def flush_(self) -> str:
        """What was held back; incomplete bytes become U+FFFD."""
        piece = self._decode(self._window)[len(self._shown) :]
        self._window, self._num_shown, self._shown = [], 0, ""
        return piece


class StopStrings:
    """Cuts text at the first stop string; text that could begin one is held back.

    The first is the one that is complete first, the longer one if two are; so the cut does not
    depend on how the text is divided.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def push_(self, text: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string ended it."""
        text = self._held + text
        found = [(i + len(stop), i) for stop in self._stops if (i := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush_(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
