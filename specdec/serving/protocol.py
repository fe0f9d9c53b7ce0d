"""Request bodies of the OpenAI endpoints, and the engine requests that they ask for."""

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from specdec.schedule import Limits, Request
from specdec.serving.errors import BadRequest
from specdec.state import GREEDY_EPSILON
from specdec.values import PENALTIES

MAX_CHOICES = 128
MAX_TEMPERATURE = 100.0
DEFAULT_MAX_TOKENS = 16  # of /v1/completions; a chat may fill the context
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # a template may want less

# Fields that would change the output if they were honoured, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}

log = logging.getLogger(__name__)


def _range(name: str) -> Any:
    return Field(ge=PENALTIES[name].low, le=PENALTIES[name].high, allow_inf_nan=False)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None


class SamplingBody(BaseModel):
    """Fields that both endpoints share. null means left out."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)] | None = (
        None
    )
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0 turn it off
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, _range("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _range("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _range("frequency_penalty")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError("should be a string or a list of strings, none of them empty")
        return stops


class CompletionBody(SamplingBody):
    prompt: list[str | list[int]]  # as the validator leaves it

    @field_validator("prompt", mode="before")
    @classmethod
    def _list_of_prompts(cls, value: Any) -> list[Any]:
        """A list of prompts, each a str or a list of ids."""
        prompts = [value] if isinstance(value, str) or _are_ids(value) else value
        right = isinstance(prompts, list) and prompts
        if not right or not all(isinstance(p, str) or _are_ids(p) for p in prompts):
            raise ValueError("should be a string, a list of strings, of ids, or of lists of ids")
        return prompts


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[Any]

    @field_validator("role")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ROLES:
            raise ValueError(f"is not a role; known are {', '.join(ROLES)}")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> str:
        """The text of a message; the text parts of a list are joined."""
        if isinstance(value, str):
            return value
        parts = value if isinstance(value, list) else [None]
        texts = [p.get("text") if isinstance(p, dict) else None for p in parts]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("should be a string or a list of parts of type text")
        return "".join(str(text) for text in texts)


class ChatBody(SamplingBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class Defaults(NamedTuple):
    """What the engine allows, and what a request gets that does not say."""

    limits: Limits
    vocab_size: int
    greedy_only: bool  # the verify rule is right at temperature 0 only
    penalties: bool = False  # tokens are counted

    @property
    def temperature(self) -> float:
        return 0.0 if self.greedy_only else 1.0


class TokenLimit(NamedTuple):
    """The field that limits a request's output, what it says, and what holds if it is left out."""

    field: str
    asked: int | None
    default: int | None  # None: the rest of the context


class Job(NamedTuple):
    """One HTTP request as the engine's requests: choice j of prompt i is number i * n + j."""

    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    num_prompt_tokens: int  # of each prompt once
    stream: bool
    include_usage: bool


def check_fields(body: SamplingBody) -> None:
    """Raises BadRequest for fields that are known and not supported; logs those not known."""
    extra: Mapping[str, Any] = body.model_extra or {}
    for name, value in extra.items():
        # By type as well, so that logprobs=0, which asks for the chosen token's, is no False.
        if name in UNSUPPORTED and value is not None:
            neutral = UNSUPPORTED[name]
            same = (v == value and isinstance(v, bool) == isinstance(value, bool) for v in neutral)
            if not any(same):
                raise BadRequest(f"{name} is not supported yet; leave it out", name)
    unknown = sorted(set(extra) - set(UNSUPPORTED) - IGNORED)
    if unknown:
        log.info("fields that mean nothing here: %s", ", ".join(map(ascii, unknown)))
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options is only allowed with stream=true", "stream_options")


def make_job(
    body: SamplingBody,
    prompts: Sequence[Sequence[int]],
    prompt_field: str,
    limit: TokenLimit,
    defaults: Defaults,
) -> Job:
    """The engine requests of a body whose prompts are tokenised.

    Args:
        prompt_field: the field that the prompts came from, for messages.

    Raises:
        BadRequest: what the engine would refuse, with the field named.
    """
    temperature = defaults.temperature if body.temperature is None else body.temperature
    if defaults.greedy_only and temperature >= GREEDY_EPSILON:
        raise BadRequest(
            f"temperature={temperature} cannot be served: this server verifies greedily; use 0",
            "temperature",
        )
    penalties = _penalties(body, defaults)
    top_k = max(body.top_k or 0, 0)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    requests = []
    for index, ids in enumerate(prompts):
        field = prompt_field if len(prompts) == 1 else f"{prompt_field}[{index}]"
        max_tokens = _max_tokens(ids, field, limit, defaults)
        requests += [
            Request(
                prompt_ids=tuple(ids),
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=0 if top_k >= defaults.vocab_size else top_k,
                top_p=1.0 if body.top_p is None else body.top_p,
                min_p=body.min_p or 0.0,
                **penalties,
                seed=choice_seed(seed, choice),
                ignore_eos=bool(body.ignore_eos),
            )
            for choice in range(body.n or 1)
        ]
    options = body.stream_options
    return Job(
        requests=tuple(requests),
        stops=tuple(body.stop or ()),
        num_prompt_tokens=sum(map(len, prompts)),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
    )


def _penalties(body: SamplingBody, defaults: Defaults) -> dict[str, float]:
    """The penalties that a body asks for, by the request's names."""
    asked = {name: getattr(body, name) for name in PENALTIES}
    asked = {name: v for name, v in asked.items() if v not in (None, PENALTIES[name].off)}
    for name, value in asked.items():
        if not defaults.penalties:
            raise BadRequest(
                f"{name}={value} is not served: this server was started with penalties=false; "
                "leave it out, or start it with penalties=true",
                name,
            )
    return asked


def choice_seed(seed: int, choice: int) -> int:
    """Seed of a prompt's choice: the request's own for the first, unrelated ones for the others."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _max_tokens(ids: Sequence[int], field: str, limit: TokenLimit, defaults: Defaults) -> int:
    """Tokens that may follow a prompt."""
    context = defaults.limits.max_model_len
    if not ids:
        raise BadRequest(f"{field} has no tokens; give at least one", field)
    if min(ids) < 0 or max(ids) >= defaults.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < defaults.vocab_size)
        raise BadRequest(
            f"{field} holds the id {wrong}; ids are 0 to {defaults.vocab_size - 1}", field
        )
    room = context - len(ids)
    if room < 1:
        raise BadRequest(
            f"{field} has {len(ids)} tokens and the context holds {context}; shorten it",
            field,
            code="context_length_exceeded",
        )
    if limit.asked is None:
        return room if limit.default is None else min(room, limit.default)
    if limit.asked > room:
        raise BadRequest(
            f"{limit.field}={limit.asked} exceeds the {room} tokens that {field} leaves of a "
            f"context of {context}; lower it",
            limit.field,
            code="context_length_exceeded",
        )
    return limit.asked


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)
