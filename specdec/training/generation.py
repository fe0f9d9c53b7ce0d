"""Text that the target writes itself: instructions, and responses to prompts."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specdec.engine import Engine
from specdec.errors import DataError
from specdec.prompts.decontaminate import Ngram, first_collision
from specdec.schedule import Request
from specdec.training.data import repeated_ngram_share

SENTINEL = "user text goes here"


class Written(NamedTuple):
    """A finished request."""

    index: int  # of the request in its stream
    request: Request
    token_ids: tuple[int, ...]  # ends with the end-of-sequence id when that ended it
    finish_reason: str


class Frame(NamedTuple):
    """The chat template's text around a first user turn."""

    before: str  # up to where the user's text begins
    after: str  # from its end to where the model's answer begins


def chat_frame(tokenizer: Any) -> Frame:
    """The template's own frame, its default system message included.

    Raises:
        DataError: the tokenizer has no chat template, or it does not keep the user's text whole.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the target's tokenizer has no chat template; self-generation needs one")
    message = [{"role": "user", "content": SENTINEL}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, found, after = text.partition(SENTINEL)
    if not found:
        raise DataError("the chat template changes the user's text; self-generation needs it whole")
    return Frame(before, after)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts that already hold the template's special tokens, all in one call."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def write(
    engine: Engine,
    requests: Iterable[Request],
    *,
    deadline: float,
    num_tokens: float = float("inf"),
    on_step: Callable[[int, int], None] | None = None,
) -> Iterator[Written]:
    """Run a stream of requests with a full batch; yields each as it ends.

    No request is started once `num_tokens` output tokens are written or under way; what runs at the
    deadline is dropped.

    Args:
        deadline: value of time.perf_counter().
        on_step: called with (output tokens so far, requests running) after each step.
    """
    stream = enumerate(requests)
    live: dict[int, tuple[int, Request, list[int]]] = {}
    written, mean_length, ended = 0, 0.0, 0
    while time.perf_counter() < deadline:
        while (
            len(live) < engine.limits.max_num_seqs
            and written + len(live) * mean_length / 2 < num_tokens
        ):
            item = next(stream, None)
            if item is None:
                break
            live[engine.add(item[1])] = (*item, [])
        if not live:
            return
        for output in engine.step():
            index, request, token_ids = live[output.request_id]
            token_ids.extend(output.token_ids)
            written += len(output.token_ids)
            if output.finish_reason:
                del live[output.request_id]
                ended += 1
                mean_length += (len(token_ids) - mean_length) / ended
                yield Written(index, request, tuple(token_ids), output.finish_reason)
        if on_step is not None:
            on_step(written, len(live))
    for request_id in live:
        engine.abort(request_id)


def instruction_requests(
    before_ids: Sequence[int], num: int, *, max_tokens: int, temperature: float, seed: int
) -> Iterator[Request]:
    """The model continues its template where the user's text would begin, and so plays the user."""
    for i in range(num):
        yield Request(
            tuple(before_ids), max_tokens=max_tokens, temperature=temperature, seed=seed + i
        )


def usable_instruction(
    text: str, min_words: int, seen: set[str], evaluation: frozenset[Ngram]
) -> bool:
    """Whether a text may serve as a prompt; `seen` holds the texts used before and is added to.

    Refused: few words, a special token inside, a repeat, an overlap with the evaluation sets.
    """
    key = " ".join(text.lower().split())
    if len(key.split()) < min_words or "<|" in text or key in seen:
        return False
    if first_collision(text, evaluation):
        return False
    seen.add(key)
    return True


def response_requests(
    prompts: Sequence[Sequence[int]],
    shares: Mapping[float, float],
    *,
    passes: int,
    max_tokens: int,
    seed: int,
) -> Iterator[Request]:
    """Each pass asks every prompt once, in an order of its own, at a temperature drawn by `shares`.

    A prompt is answered greedily at most once.
    """
    rng = random.Random(seed)
    temperatures, weights = list(shares), list(shares.values())
    greedy: set[int] = set()
    for _ in range(passes):
        order = list(range(len(prompts)))
        rng.shuffle(order)
        for i in order:
            (temperature,) = rng.choices(temperatures, weights)
            if temperature == 0:
                if i in greedy:
                    continue
                greedy.add(i)
            yield Request(
                tuple(prompts[i]),
                max_tokens=max_tokens,
                temperature=temperature,
                seed=rng.getrandbits(62),
            )


class Kept(NamedTuple):
    """Why responses were kept or dropped, by temperature."""

    kept: dict[float, int]
    looped: dict[float, int]
    failed: dict[float, int]
    tokens: dict[float, int]  # in the kept ones

    @classmethod
    def empty(cls, temperatures: Iterable[float]) -> "Kept":
        return cls(*(dict.fromkeys(temperatures, 0) for _ in range(4)))


def keep_response(written: Written, counts: Kept, max_loop_share: float) -> bool:
    """Whether a response is taught: not one that repeats itself, nor a failed one. Counts it."""
    temperature = written.request.temperature
    if written.finish_reason == "error" or not written.token_ids:
        counts.failed[temperature] += 1
        return False
    if repeated_ngram_share(written.token_ids) > max_loop_share:
        counts.looped[temperature] += 1
        return False
    counts.kept[temperature] += 1
    counts.tokens[temperature] += len(written.token_ids)
    return True


def shuffle_(samples: list, seed: int) -> None:
    """Random order: short responses end first, and a prefix of the data must be like the whole."""
    random.Random(seed).shuffle(samples)
