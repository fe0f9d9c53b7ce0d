"""Decode a prompt set with the engine, and the same requests plainly beside it for the speedup."""

import hashlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig

from specdec.build import BoundStages, Models, build_engine, context_length
from specdec.engine import Engine
from specdec.engine import Output as EngineOutput
from specdec.errors import RequestError
from specdec.generate import Result, generate, stepwise
from specdec.metrics import Output
from specdec.prompts import Prompt, PromptSet, render
from specdec.runner import Kind
from specdec.schedule import Request

TURN_SECONDS = 0.2  # that an engine runs before another does
WARMUP_TOKENS = 8


class Task(NamedTuple):
    """One request and where it comes from."""

    prompt: Prompt
    turn: int
    sample: int
    request: Request


class Stint(NamedTuple):
    """What an engine did before another one had its turn."""

    tokens: int
    seconds: float


class Decoded(NamedTuple):
    """Outputs in prompt-file order, then turn, then sample; times are of decoding alone, with the
    prefills and without loading and warm-up."""

    outputs: list[Output]
    texts: list[str]  # of each output
    stints: list[Stint]
    baseline_stints: list[Stint]  # none without a baseline


def request_seed(seed: int, prompt_id: str, turn: int, sample: int) -> int:
    """A request's own seed [0, 2^63): the same whichever other prompts are run."""
    key = f"{seed}/{prompt_id}/{turn}/{sample}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1


def decode_prompts(
    cfg: DictConfig,
    models: Models,
    bound: BoundStages,
    prompts: PromptSet,
    *,
    baseline: BoundStages | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Decoded:
    """Run every turn of every prompt, a turn of all prompts at a time with continuous batching.

    Args:
        baseline: stages that decode the same requests too, taking turns with `bound`.
        advance: called when an output is complete.

    Raises:
        RequestError: a prompt does not fit the context.
    """
    finished: dict[tuple[str, int, int], tuple[Task, Result, str]] = {}
    answers: dict[tuple[str, int], list[str]] = {}
    stints: tuple[list[Stint], list[Stint]] = ([], [])
    for turn in range(max(len(p.turns) for p in prompts.prompts)):
        tasks = turn_tasks(cfg, models, prompts, turn, answers)
        requests = [task.request for task in tasks]
        contenders = [stages for stages in (bound, baseline) if stages]
        engines = [warm_engine(cfg, models, stages, requests) for stages in contenders]
        results, taken = interleave(engines, requests, advance)
        for own, new in zip(stints, taken, strict=False):
            own.extend(new)
        for task, result in zip(tasks, results[0], strict=True):
            text = models.tokenizer.decode(list(result.token_ids), skip_special_tokens=True)
            answers.setdefault((task.prompt.prompt_id, task.sample), []).append(text)
            finished[task.prompt.prompt_id, turn, task.sample] = (task, result, text)
    ordered = [
        finished[p.prompt_id, turn, sample]
        for p in prompts.prompts
        for turn in range(len(p.turns))
        for sample in range(cfg.sampling.num_samples)
    ]
    outputs = [output_of(models.tokenizer, task, result) for task, result, _ in ordered]
    texts = [text for _, _, text in ordered]
    return Decoded(outputs, texts, *stints)


def warm_engine(
    cfg: DictConfig, models: Models, stages: BoundStages, requests: Sequence[Request]
) -> Engine:
    """An engine sized for the requests, its first calls behind it."""
    longest = max(len(r.prompt_ids) + r.max_tokens for r in requests)
    engine = build_engine(
        cfg,
        models,
        stages,
        longest=longest,
        num_requests=len(requests),
        penalties=any(request.has_penalties for request in requests),
    )
    warm_up(engine, requests[0])
    return engine


def turn_tasks(
    cfg: DictConfig,
    models: Models,
    prompts: PromptSet,
    turn: int,
    answers: dict[tuple[str, int], list[str]],
) -> list[Task]:
    """The requests of one turn, in the order of the prompts, then samples.

    Args:
        answers: texts of the earlier turns by (prompt id, sample).
    """
    limit = context_length(cfg, models)
    tasks = []
    for prompt in prompts.prompts:
        for sample in range(cfg.sampling.num_samples if turn < len(prompt.turns) else 0):
            history = answers.get((prompt.prompt_id, sample), [])
            ids = tuple(render(prompts, prompt, models.tokenizer, history))
            if len(ids) >= limit:
                raise RequestError(
                    f"prompt {prompt.prompt_id!r} (turn {turn + 1}) has {len(ids)} tokens and the "
                    f"context holds {limit}; shorten or remove it"
                )
            seed = request_seed(cfg.sampling.seed, prompt.prompt_id, turn, sample)
            tasks.append(Task(prompt, turn, sample, make_request(cfg, ids, seed)))
    return tasks


def make_request(cfg: DictConfig, prompt_ids: tuple[int, ...], seed: int) -> Request:
    sampling = cfg.sampling
    return Request(
        prompt_ids=prompt_ids,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=max(sampling.top_k or 0, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=seed,
        ignore_eos=sampling.ignore_eos,
    )


def output_of(tokenizer: Any, task: Task, result: Result) -> Output:
    def num_bytes(ids: Sequence[int]) -> int:
        return len(tokenizer.decode(list(ids), skip_special_tokens=True).encode())

    return Output(
        prompt_id=task.prompt.prompt_id,
        turn=task.turn,
        category=task.prompt.category,
        sample=task.sample,
        token_ids=result.token_ids,
        rounds=result.rounds,
        num_bytes=max(0, num_bytes(result.token_ids) - num_bytes(result.token_ids[:1])),
        seconds=result.seconds,
        finish_reason=result.finish_reason,
    )


def warm_up(engine: Engine, request: Request) -> None:
    """Touch every shape once, so that no first call is timed and no graph is captured then."""
    kind = Kind(request.is_greedy, request.has_filters, request.has_penalties)
    engine.runner.warm_up([kind])
    tokens = min(WARMUP_TOKENS, request.max_tokens)
    generate(engine, [replace(request, max_tokens=tokens, ignore_eos=True)])


def interleave(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[list[Result]], list[list[Stint]]]:
    """Run the same requests through each engine, as if it were alone.

    The engines take short turns, so that a drift of the machine's speed meets all.

    Args:
        advance: called for every request, when the last engine is done with it.

    Returns:
        Results of each engine in the order of `requests`, and its turns.
    """
    finished = [0] * len(engines)
    tokens = [0] * len(engines)  # of the turn
    seconds = [0.0] * len(engines)  # of all turns before it
    stints: list[list[Stint]] = [[] for _ in engines]
    began = 0.0  # when the turn did

    def run(index: int) -> Generator[None, None, list[Result]]:
        def on_output(output: EngineOutput) -> None:
            tokens[index] += len(output.token_ids)
            if output.finish_reason:
                before = min(finished)
                finished[index] += 1
                if min(finished) > before:
                    advance()

        def clock() -> float:
            return seconds[index] + time.perf_counter() - began

        return stepwise(engines[index], requests, on_output, clock)

    runs = {index: run(index) for index in range(len(engines))}
    results: list[list[Result]] = [[] for _ in engines]
    while runs:
        for index, steps in list(runs.items()):
            began = time.perf_counter()
            try:
                next(steps)
                while len(engines) == 1 or time.perf_counter() - began < TURN_SECONDS:
                    next(steps)
            except StopIteration as end:
                results[index] = end.value
                del runs[index]
            if engines[index].runner.device.type == "cuda":
                torch.cuda.synchronize(engines[index].runner.device)  # a step may be in flight
            stints[index].append(Stint(tokens[index], time.perf_counter() - began))
            seconds[index] += stints[index][-1].seconds
            tokens[index] = 0
    return results, stints
