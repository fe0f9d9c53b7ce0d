"""Self-generation: the target writes the text that its draft head is trained on.

    python experiments/generate.py path=data/self responses.num_tokens=16_000_000 \
        prompts.gsm8k_path=train.jsonl prompts.eval_paths=[mt_bench.jsonl]

Prompts are written seeds, templates and instructions that the model writes itself, or another bank
(`prompts.bank._target_=specdec.prompts.simple_prompts`: stories in simple words); the responses
are sampled at several temperatures, and those that repeat themselves are dropped. The data set goes
to `path`, `summary.json` to the run folder.
"""

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specdec.checks import check_values, plain
from specdec.errors import ConfigError, DataError
from specdec.experiments.jobs import hydra_script, write_json
from specdec.training.config import register

register()

REPORT_SECONDS = 5.0


def generate_data(cfg: DictConfig, folder: Path) -> float:
    """One run. Returns the response tokens a second."""
    from specdec.training.data import merge_datasets

    check_values(cfg)
    path = Path(cfg.path or folder / "data")
    if path.exists():
        raise DataError(f"path={path} exists already; give the data set another folder")
    if cfg.num_processes < 1:
        raise ConfigError(f"num_processes={cfg.num_processes} must be at least 1")
    temperatures(cfg)
    parts = [path.with_name(f"{path.name}.part-{i}") for i in range(cfg.num_processes)]
    if cfg.num_processes == 1:
        reports = [write_part(cfg, parts[0], 0)]
    else:
        tasks = [(cfg, part, index) for index, part in enumerate(parts)]
        with multiprocessing.get_context("spawn").Pool(cfg.num_processes) as pool:
            reports = pool.starmap(write_part, tasks, chunksize=1)
    seconds = max(report["response_seconds"] for report in reports)
    summary = {
        **{name: add_up([report[name] for report in reports]) for name in reports[0]},
        "response_seconds": seconds,
        "tokens_per_second": sum(report["response_tokens"] for report in reports) / seconds,
        "config": plain(cfg),
    }
    totals = merge_datasets(parts, path, meta={k: v for k, v in summary.items() if k != "config"})
    for part in parts:
        shutil.rmtree(part)
    summary |= {"path": str(path), **totals}
    write_json(folder / "summary.json", summary)
    print(json.dumps({k: v for k, v in summary.items() if k != "config"}, indent=2))
    return summary["tokens_per_second"]


def add_up(values: list[Any]) -> Any:
    """Sums of numbers, or of mappings of numbers by key."""
    if isinstance(values[0], dict):
        return {key: sum(value[key] for value in values) for key in values[0]}
    return sum(values)


def temperatures(cfg: DictConfig) -> dict[float, float]:
    """Share of the responses by temperature; raises ConfigError for what is not a share."""
    try:
        shares = {float(t): float(share) for t, share in cfg.responses.shares.items()}
    except ValueError as error:
        raise ConfigError(f"responses.shares={dict(cfg.responses.shares)}: {error}") from error
    if not shares or min(shares) < 0 or min(shares.values()) < 0 or not sum(shares.values()):
        raise ConfigError(
            f"responses.shares={dict(cfg.responses.shares)} must give temperatures of at least 0 "
            "shares that are not all 0"
        )
    return {t: share for t, share in shares.items() if share}


def write_part(cfg: DictConfig, path: Path, index: int) -> dict[str, Any]:
    """The share of the data set that process `index` of `cfg.num_processes` writes."""
    from specdec.build import load_models
    from specdec.runtime import use_threads
    from specdec.training import generation
    from specdec.training.data import response, write_dataset

    models = load_models(cfg, uses_draft=False)
    use_threads(cfg.num_threads, models.target)
    stages = part_stages(cfg)
    frame = generation.chat_frame(models.tokenizer)
    started = time.perf_counter()
    texts = prompt_texts(cfg, models, stages, frame, index)
    asked = time.perf_counter()
    prompts = generation.encode(models.tokenizer, [frame.before + t + frame.after for t in texts])
    fitting = [tuple(ids) for ids in prompts if len(ids) <= cfg.prompts.max_prompt_tokens]
    prompts = list(dict.fromkeys(fitting))
    if not prompts:
        raise DataError(f"no prompt of at most {cfg.prompts.max_prompt_tokens} tokens is left")

    longest = max(map(len, prompts)) + cfg.responses.max_tokens
    engine = part_engine(cfg, models, stages, longest)
    shares = temperatures(cfg)
    requests = generation.response_requests(
        prompts,
        shares,
        passes=cfg.prompts.passes,
        max_tokens=cfg.responses.max_tokens,
        seed=cfg.seed * cfg.num_processes + index,
    )
    began = time.perf_counter()
    limit, num_tokens = cfg.responses.max_seconds, cfg.responses.num_tokens
    counts = generation.Kept.empty(shares)
    samples, written = [], 0
    for answer in generation.write(
        engine,
        requests,
        deadline=began + (limit or float("inf")),
        num_tokens=(num_tokens or float("inf")) / cfg.num_processes,
        on_step=reporter(f"part {index} responses", began),
    ):
        written += len(answer.token_ids)
        if generation.keep_response(answer, counts, cfg.responses.max_loop_share):
            request = answer.request
            samples.append(response(request.prompt_ids, answer.token_ids, request.temperature))
    seconds = time.perf_counter() - began
    generation.shuffle_(samples, cfg.seed + index)
    write_dataset(path, samples, vocab_size=models.target.vocab_size, meta={})
    by_temperature = {
        f"{name}_at_temperature": {str(t): n for t, n in values.items()}
        for name, values in counts._asdict().items()
    }
    return {
        "prompts": len(prompts),
        "prompt_seconds": asked - started,
        "response_tokens": written,
        "response_seconds": seconds,
        **by_temperature,
    }


def prompt_texts(cfg: DictConfig, models: Any, stages: Any, frame: Any, index: int) -> list[str]:
    """User texts of one process: its share of the prompt bank, and what the model asks itself."""
    from specdec.bind import bind
    from specdec.prompts.decontaminate import evaluation_texts, ngram_set
    from specdec.training import generation

    bank: list[str] = []
    if cfg.prompts.num_prompts:
        offered = {"eval_paths": list(cfg.prompts.eval_paths)}
        if cfg.prompts.gsm8k_path is not None:
            offered["gsm8k_path"] = cfg.prompts.gsm8k_path
        write_bank = bind(
            cfg.prompts.bank, fn_args=("num", "seed"), offered=offered, key="prompts.bank"
        )
        rows = write_bank(cfg.prompts.num_prompts, cfg.seed)
        bank = [row["turns"][0] for row in rows][index :: cfg.num_processes]
    texts, asked = list(bank), cfg.instructions
    if asked.num:
        own = [str(files("specdec.prompts") / f"{name}.jsonl") for name in ("builtin", "dev")]
        evaluation = ngram_set(evaluation_texts([*own, *cfg.prompts.eval_paths]))
        seen = {" ".join(text.lower().split()) for text in bank}
        (before,) = generation.encode(models.tokenizer, [frame.before])
        engine = part_engine(cfg, models, stages, len(before) + asked.max_tokens)
        began = time.perf_counter()
        num = -(-asked.num // cfg.num_processes)
        requests = generation.instruction_requests(
            before,
            num,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            seed=(cfg.seed * cfg.num_processes + index) * asked.num,
        )
        endings = set(models.eos_token_ids)
        written = []
        for text in generation.write(
            engine,
            requests,
            deadline=began + (asked.max_seconds or float("inf")),
            on_step=reporter(f"part {index} instructions", began),
        ):
            if text.finish_reason == "stop" and text.token_ids[-1] in endings:
                written.append(list(text.token_ids[:-1]))
        usable = partial(
            generation.usable_instruction,
            min_words=asked.min_words,
            seen=seen,
            evaluation=evaluation,
        )
        decoded = models.tokenizer.batch_decode(written, skip_special_tokens=False)
        kept = [text for text in (text.strip() for text in decoded) if usable(text)]
        texts += kept
        print(
            f"part {index}: {len(bank)} prompts of the bank, {len(kept)} own instructions "
            f"of {len(written)} that ended ({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    return texts


def part_stages(cfg: DictConfig) -> Any:
    """The stages, held against the highest temperature that a request will have."""
    from omegaconf import OmegaConf

    from specdec.build import STAGE_ARGS, build_stages

    nodes = {name: cfg[name] for name in STAGE_ARGS}
    highest = max(*temperatures(cfg), cfg.instructions.temperature if cfg.instructions.num else 0)
    return build_stages(OmegaConf.create({**nodes, "sampling": {"temperature": highest}}))


def part_engine(cfg: DictConfig, models: Any, stages: Any, longest: int) -> Any:
    from specdec.build import build_engine

    return build_engine(
        cfg, models, stages, longest=longest, num_requests=cfg.schedule.max_num_seqs
    )


def reporter(label: str, began: float) -> Callable[[int, int], None]:
    """Prints the rate every few seconds."""
    last = began

    def report(tokens: int, running: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= REPORT_SECONDS:
            last = now
            rate = tokens / (now - began)
            print(
                f"{label}: {tokens:,} tokens, {rate:,.0f} a second, {running} running", flush=True
            )

    return report


main = hydra_script("generate")(generate_data)

if __name__ == "__main__":
    main()
