"""What each key's value may be: of the main job, training, self-generation, timing, the server."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_BLOCK_SIZE = 4096  # tokens; a request wastes half a block
MAX_THREADS = 1024


class Penalty(NamedTuple):
    off: float  # changes nothing
    low: float
    high: float


PENALTIES = {  # OpenAI's ranges, where it has the penalty; fp32 logits stay finite under the first
    "repetition_penalty": Penalty(1.0, 0.001, 1000.0),
    "presence_penalty": Penalty(0.0, -2.0, 2.0),
    "frequency_penalty": Penalty(0.0, -2.0, 2.0),
}


def _at_least(low: int) -> tuple[Callable[[Any], bool], str]:
    return lambda v: v >= low, f"an integer of at least {low}"


def _between(low: int, high: int) -> tuple[Callable[[Any], bool], str]:
    return lambda v: low <= v <= high, f"an integer from {low} to {high}"


def _from_to(low: float, high: float) -> tuple[Callable[[Any], bool], str]:
    return lambda v: low <= v <= high, f"from {low:g} to {high:g}"


def _null_or(check: tuple[Callable[[Any], bool], str]) -> tuple[Callable[[Any], bool], str]:
    holds, what = check
    return lambda v: v is None or holds(v), f"null or {what}"


def _one_of(*names: str) -> tuple[Callable[[Any], bool], str]:
    return lambda v: v in names, f"one of {', '.join(names)}"


_NOT_NEGATIVE = (lambda v: math.isfinite(v) and v >= 0, "a finite number of at least 0")
_SEED = (lambda v: -MAX_SEED - 1 <= v <= MAX_SEED, "a 64-bit integer")
_POSITIVE = (lambda v: math.isfinite(v) and v > 0, "a finite number above 0")
_SHARE = (lambda v: 0 <= v <= 1, "from 0 to 1")
_PATH = (lambda v: v.strip() != "", "a path, package:NAME/FILE or pretrained/NAME")

CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "sampling.temperature": _NOT_NEGATIVE,
    "sampling.top_k": (
        lambda v: v is None or -1 <= v <= MAX_TOP_K,
        f"null (off) or a positive integer up to {MAX_TOP_K}",
    ),
    "sampling.top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "sampling.min_p": _SHARE,
    **{f"sampling.{name}": _from_to(p.low, p.high) for name, p in PENALTIES.items()},
    "sampling.max_tokens": _at_least(1),
    "sampling.num_samples": _at_least(1),
    "sampling.seed": _SEED,
    "seed": _SEED,
    "propose.num_draft_tokens": _at_least(0),
    "propose.draft_sampling": _one_of("auto", "greedy", "sample"),
    "propose.temperature": _null_or(_NOT_NEGATIVE),
    "propose.min_ngram": _at_least(1),
    "propose.max_ngram": _at_least(1),
    "target.path": _PATH,
    "target.quantize": _one_of("none", "fp8", "int8", "int4"),
    "quantize": _one_of("none", "fp8", "int8", "int4"),
    "draft.path": _null_or(_PATH),
    "draft.logits_from": _one_of("auto", "shared", "target_rows"),
    "draft.num_draft_rows": _null_or(_at_least(1)),
    "verify.noise": _one_of("independent", "shared"),
    "schedule.max_num_seqs": _at_least(1),
    "schedule.max_num_batched_tokens": _at_least(1),
    "cache.block_size": _between(1, MAX_BLOCK_SIZE),
    "cache.num_blocks": _null_or(_at_least(2)),
    "cache.max_model_len": _null_or(_at_least(2)),
    "kernels.backend": _one_of("auto", "torch", "triton"),
    "data.num_prompts": _null_or(_at_least(1)),
    "data.turns": _one_of("first", "all"),
    "device": (
        lambda v: v in ("auto", "cpu", "cuda") or v.startswith("cuda:"),
        "one of auto, cpu, cuda",
    ),
    "dtype": _one_of("auto", "float32", "bfloat16"),
    "num_threads": _null_or(_between(1, MAX_THREADS)),
    "logger.mode": _null_or(_one_of("online", "offline", "disabled")),
    "logger.project": (
        lambda v: 0 < len(v) <= 128 and not set(v) & set("/\\#?%:"),
        "a name of at most 128 characters without / \\ # ? % :",
    ),
    # train_mtp.py
    "train_data.num_tokens": _null_or(_at_least(1)),
    "train_data.row_tokens": _at_least(2),
    "unroll.num_steps": _at_least(1),
    "unroll.num_chunks": _at_least(1),
    "unroll.decay": _POSITIVE,
    "head.num_layers": _at_least(1),
    "head.num_rows": _null_or(_at_least(1)),
    "budget.epochs": _null_or(_at_least(1)),
    "budget.max_steps": _null_or(_at_least(1)),
    "budget.max_tokens": _null_or(_at_least(1)),
    "budget.max_seconds": _null_or(_POSITIVE),
    "budget.stop_after_steps": _null_or(_at_least(1)),
    "optimizer.lr": _NOT_NEGATIVE,
    "optimizer.matrix_lr": _NOT_NEGATIVE,
    "lr_schedule.warmup": _SHARE,
    "lr_schedule.final": _SHARE,
    "accumulation": _at_least(1),
    "clip_norm": _POSITIVE,
    "average_decay": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "eval_every": _null_or(_at_least(0)),
    "log_every": _at_least(1),
    "save_every": _null_or(_at_least(1)),
    # experiments/generate.py
    "prompts.num_prompts": _at_least(0),
    "prompts.max_prompt_tokens": _at_least(1),
    "prompts.passes": _at_least(1),
    "instructions.num": _at_least(0),
    "instructions.max_tokens": _at_least(1),
    "instructions.temperature": _NOT_NEGATIVE,
    "instructions.max_seconds": _null_or(_POSITIVE),
    "responses.max_tokens": _at_least(1),
    "responses.max_loop_share": _SHARE,
    "responses.num_tokens": _null_or(_at_least(1)),
    "responses.max_seconds": _null_or(_POSITIVE),
    "num_processes": _at_least(1),
    # experiments/quality.py
    "rival.num_draft_tokens": _at_least(0),
    "builtin.num_prompts": _null_or(_at_least(1)),
    "builtin_max_tokens": _at_least(1),
    "text.num_samples": _at_least(1),
    "text.temperature": _NOT_NEGATIVE,
    "text.max_tokens": _at_least(1),
    "text.heldout_tokens": _null_or(_at_least(1)),
    # experiments/speed.py
    "batch_sizes": (lambda v: len(v) > 0 and min(v) >= 1, "a list of integers of at least 1"),
    "vocab_size": _null_or(_at_least(2)),
    "prompt_tokens": _at_least(1),
    "repeats": _at_least(1),
    "num_profiled": _at_least(0),
    "arrivals.batch": _null_or(_at_least(1)),
    "arrivals.num_requests": _at_least(10),
    "arrivals.attempts": _at_least(1),
    # serve.py
    "drain_seconds": _at_least(0),
}
