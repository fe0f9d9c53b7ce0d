"""Step time and its parts for a named shape with random weights and made-up acceptance.

    python experiments/speed.py shape=llama_8b draft_shape=eagle3_8b batch_sizes=[1,8,64]
    python experiments/speed.py propose=none batch_sizes=[1,64]
    python experiments/speed.py batch_sizes=[32] arrivals.batch=32

The run folder gets `speed.json` (one row a batch size), `kernels.json` (what the GPU ran in a step)
and `speed.png`.
"""

from __future__ import annotations

import gc
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from specdec.checks import check_values, plain
from specdec.experiments.jobs import hydra_script, in_sweep, job_info, write_json

if TYPE_CHECKING:
    from specdec.build import BoundStages, Models
    from specdec.engine import Engine
    from specdec.experiments.steps import Pass, Trace

CLOSE = 0.05  # of the batch that arrivals aim at, where looking for the rate ends
MOST_ON_CPU = 10**9  # parameters of a target for which a missing GPU is not an error


@hydra_script("speed")
def main(cfg: DictConfig, folder: Path) -> float:
    """One job. Returns the step time in ms at the first batch size."""
    from specdec.bind import bind

    if not in_sweep():
        check_values(cfg)
    logger = bind(cfg.logger, fn_args=("job",), key="logger")
    with logger(job_info(cfg, folder, "bench")) as run_log:
        check_values(cfg)
        summary = run(cfg, folder)
        run_log.table("speed", list(summary["rows"][0]), [[*r.values()] for r in summary["rows"]])
        run_log.image("speed", folder / "speed.png")
        run_log.summary({"rows": summary["rows"], "arrivals": summary["arrivals"]})
    return summary["rows"][0]["step_ms"]


def run(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """Measure every batch size and write everything to `folder`. Returns the summary."""
    from specdec.build import build_stages
    from specdec.experiments.acceptance import versions
    from specdec.experiments.plots import plot_speed
    from specdec.experiments.roofline import ceilings, floor_ms
    from specdec.experiments.tables import progress
    from specdec.runtime import device_name, use_threads

    bound = build_stages(cfg)
    models = random_models(cfg, bound)
    num_threads = use_threads(cfg.num_threads, models.target)
    limits = ceilings(models.device)
    rows, kernels = [], {}
    passes = len(cfg.batch_sizes) * (2 + cfg.repeats) + bool(cfg.arrivals.batch)
    with progress("timing", passes) as advance:
        for batch in cfg.batch_sizes:
            row, trace = measure(cfg, models, bound, batch, advance)
            row["floor_ms"] = floor_ms(models, bound.num_draft_tokens, batch, mean_len(cfg), limits)
            row["floor_share"] = row["floor_ms"] and row["floor_ms"] / row["step_ms"]
            rows.append(row)
            kernels[batch] = trace.kernels if trace else []
        arrivals = None
        if cfg.arrivals.batch:
            arrivals = measure_arrivals(cfg, models, bound, rows)
            advance("arrivals")
    summary = {
        "rows": rows,
        "arrivals": arrivals,
        "num_draft_tokens": bound.num_draft_tokens,
        "draft_sampling": bound.draft_sampling,
        "ceilings": limits,
        "device": str(models.device),
        "device_name": device_name(models.device),
        "dtype": str(models.dtype).removeprefix("torch."),
        "num_threads": num_threads if models.device.type == "cpu" else None,
        "config": plain(cfg),
        "versions": versions(),
    }
    write_json(folder / "speed.json", summary)
    write_json(folder / "kernels.json", kernels)
    plot_speed(rows, folder / "speed.png")
    print_summary(summary, folder)
    return summary


def random_models(cfg: DictConfig, bound: BoundStages) -> Models:
    """The target of `shape` and, where the proposer uses one, the head of `draft_shape`.

    Raises:
        ConfigError: a shape is not one of a model, or the target's is for a GPU and there is none.
    """
    from specdec import runtime
    from specdec.build import Models
    from specdec.errors import ConfigError
    from specdec.experiments.random_models import num_parameters, random_draft, random_target

    device = runtime.pick_device(cfg.device)
    dtype = runtime.pick_dtype(cfg.dtype, device)
    settings = plain(cfg)
    shape = settings["shape"]
    if cfg.vocab_size is not None:
        shape["vocab_size"] = cfg.vocab_size
    size = num_parameters(shape)
    if cfg.device == "auto" and device.type == "cpu" and size > MOST_ON_CPU:
        raise ConfigError(
            f"a shape of {size / 1e9:.1f} billion parameters is for a GPU, and there is none; "
            "use shape=llama_tiny draft_shape=eagle3_tiny vocab_size=2048, or device=cpu to time "
            "it here all the same"
        )
    target = random_target(shape, device=device, dtype=dtype, seed=cfg.seed, quantize=cfg.quantize)
    draft = None
    if bound.uses_draft:
        draft = random_draft(settings["draft_shape"] or shape, target, seed=cfg.seed + 1)
    return Models(target, draft, None, (), device, dtype)


def mean_len(cfg: DictConfig) -> float:
    """Tokens of a request halfway through its output."""
    return cfg.prompt_tokens + cfg.sampling.max_tokens / 2


def new_engine(cfg: DictConfig, models: Models, bound: BoundStages, slots: int) -> Engine:
    from specdec.build import build_engine

    gc.collect()  # the caches of the engine before
    (request,) = requests_of(cfg, models, 1)
    return build_engine(
        cfg,
        models,
        bound,
        longest=cfg.prompt_tokens + cfg.sampling.max_tokens,
        num_requests=slots,
        penalties=request.has_penalties,
    )


def requests_of(cfg: DictConfig, models: Models, num: int) -> list[Any]:
    from specdec.experiments.steps import random_requests

    sampling = cfg.sampling
    return random_requests(
        num,
        models.target.vocab_size,
        cfg.prompt_tokens,
        seed=cfg.seed,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=max(sampling.top_k or 0, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )


def measure(
    cfg: DictConfig, models: Models, bound: BoundStages, batch: int, advance: Any
) -> tuple[dict[str, Any], Trace | None]:
    """The row of one batch size, and what a profiler saw of it."""
    from specdec.experiments.steps import lockstep, traced

    requests = requests_of(cfg, models, batch)
    engine = new_engine(cfg, models, bound, batch)
    lockstep(engine, requests)  # kernels compile, graphs are captured
    advance(f"batch {batch}")
    passes = []
    for _ in range(cfg.repeats):
        passes.append(lockstep(engine, requests))
        advance(f"batch {batch}")
    trace = None
    if models.device.type == "cuda" and cfg.num_profiled:
        trace = traced(engine, requests, cfg.num_profiled)
    memory = used_memory(models)
    del engine
    parts = measure_parts(cfg, models, bound, batch) if cfg.measure_parts else {}
    advance(f"batch {batch}")
    row = {
        "batch": batch,
        **step_times(passes, batch),
        **{f"{name}_ms": seconds * 1e3 for name, seconds in parts.items()},
        "idle_share": trace and trace.idle_share,
        "busy_ms": trace and trace.busy_ms,
        "num_kernels": trace and trace.num_kernels,
        "memory_gb": memory,
    }
    return row, trace


def step_times(passes: list[Pass], batch: int) -> dict[str, Any]:
    """Step time over the full steps of all passes, and the rates that follow from it."""
    from specdec.errors import ConfigError

    intervals = sorted(seconds for one in passes for seconds in one.intervals)
    if not intervals:
        raise ConfigError(
            "no two full steps in a row were seen; raise sampling.max_tokens, or lower the batch"
        )
    step = statistics.median(intervals)
    tokens = statistics.mean(one.tokens_per_step for one in passes)
    return {
        "step_ms": step * 1e3,
        "step_ms_p10": intervals[len(intervals) // 10] * 1e3,
        "step_ms_p90": intervals[len(intervals) * 9 // 10] * 1e3,
        "num_steps": len(intervals),
        "tokens_per_step": tokens,
        "tokens_per_second": batch * tokens / step,  # of full steps alone
        "run_tokens_per_second": statistics.median(  # prefill and the last rounds included
            one.num_tokens / one.seconds for one in passes
        ),
    }


def measure_parts(
    cfg: DictConfig, models: Models, bound: BoundStages, batch: int
) -> dict[str, float]:
    """Seconds of each part of a step, from an engine that stamps the time between them."""
    from specdec.experiments.steps import lockstep, part_seconds, stamped_stages, stamped_target
    from specdec.kernels.stamps import new_stamps, read, reset_

    stamps = new_stamps(models.device)
    target = stamped_target(models.target, stamps)
    stages = stamped_stages(bound.stages, stamps)
    engine = new_engine(cfg, models._replace(target=target), bound._replace(stages=stages), batch)
    requests = requests_of(cfg, models, batch)
    lockstep(engine, requests)
    reset_(stamps)
    lockstep(engine, requests)
    return part_seconds(read(stamps))


def measure_arrivals(
    cfg: DictConfig, models: Models, bound: BoundStages, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Poisson arrivals at a rate that keeps about `arrivals.batch` requests at a time.

    Tokens a second, for each request that is there, are held against those of `arrivals.batch`
    requests that start together: over their whole run (`ratio`), and over their full steps alone,
    without any prefill (`ratio_to_full_steps`).
    """
    from specdec.experiments.steps import arrive, lockstep
    from specdec.experiments.tables import warm_up

    wanted = cfg.arrivals.batch
    row = next((row for row in rows if row["batch"] == wanted), None)
    if row is None:
        engine, together = new_engine(cfg, models, bound, wanted), requests_of(cfg, models, wanted)
        lockstep(engine, together)
        row = step_times([lockstep(engine, together) for _ in range(cfg.repeats)], wanted)
        del engine
    requests = requests_of(cfg, models, cfg.arrivals.num_requests)
    engine = new_engine(cfg, models, bound, 2 * wanted)
    warm_up(engine)  # graphs of every padded shape
    rate = row["run_tokens_per_second"] / cfg.sampling.max_tokens
    arrive(engine, requests[: max(10, len(requests) // 4)], rate)  # what is not warm yet
    attempts = []
    for attempt in range(cfg.arrivals.attempts):
        found = arrive(engine, requests, rate, seed=cfg.seed + attempt)
        attempts.append({"rate": rate, **found._asdict()})
        if abs(found.mean_batch / wanted - 1) <= CLOSE:
            break
        rate *= min(2.0, max(0.5, wanted / max(found.mean_batch, 1e-9)))
    best = min(attempts, key=lambda a: abs(a["mean_batch"] / wanted - 1))
    each = best["tokens_per_second"] / max(best["mean_batch"], 1e-9) * wanted
    return {
        **best,
        "ratio": each / row["run_tokens_per_second"],
        "ratio_to_full_steps": each / row["tokens_per_second"],
        "lockstep_run_tokens_per_second": row["run_tokens_per_second"],
        "lockstep_tokens_per_second": row["tokens_per_second"],
        "attempts": attempts,
    }


def used_memory(models: Models) -> float | None:
    """GB that torch holds on the GPU."""
    import torch

    if models.device.type != "cuda":
        return None
    return torch.cuda.memory_reserved(models.device) / 1e9


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    from specdec.experiments.tables import number, print_table

    rows = summary["rows"]
    columns = {
        "batch": ("batch", 0),
        "step_ms": ("step ms", 3),
        "step_ms_p10": ("p10", 3),
        "step_ms_p90": ("p90", 3),
        "target_ms": ("target", 3),
        "verification_ms": ("verify", 3),
        "drafting_ms": ("draft", 3),
        "rest_ms": ("rest", 3),
        "idle_share": ("idle", 3),
        "tokens_per_step": ("tokens/step", 2),
        "tokens_per_second": ("tokens/s", 0),
        "floor_share": ("floor/step", 2),
    }
    columns = {c: v for c, v in columns.items() if any(row.get(c) is not None for row in rows)}
    cells = [[number(row.get(c), d) for c, (_, d) in columns.items()] for row in rows]
    title = f"K={summary['num_draft_tokens']} on {summary['device_name']} {summary['dtype']}"
    print_table(title, [name for name, _ in columns.values()], cells)
    if summary["arrivals"]:
        found = summary["arrivals"]
        print(
            f"arrivals: {found['tokens_per_second']:.0f} tokens/s at a batch of "
            f"{found['mean_batch']:.1f}, {found['ratio']:.1%} of a run of as many that start "
            f"together, {found['ratio_to_full_steps']:.1%} of its full steps"
        )
    print(f"results: {folder}")


if __name__ == "__main__":
    main()
