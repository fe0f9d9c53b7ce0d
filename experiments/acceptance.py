"""The main job: decode a prompt set and measure acceptance.

    python experiments/acceptance.py verify=rejection propose.num_draft_tokens=4
    python experiments/acceptance.py -m propose.num_draft_tokens=1,2,4 sampling.temperature=0,1

The run folder gets `summary.json`, `per_prompt.csv`, `outputs.jsonl` and `acceptance.png`.
"""

import csv
import json
import platform
import random
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specdec.checks import check_values, plain
from specdec.experiments.jobs import hydra_script, in_sweep, job_info, write_json
from specdec.experiments.loggers import RunLog

PACKAGES = ("specdec", "torch", "triton", "transformers", "tokenizers", "numpy", "hydra-core")


@hydra_script("config")
def main(cfg: DictConfig, folder: Path) -> float | None:
    """One job. Returns the acceptance length, for sweepers that optimise it."""
    from specdec.bind import bind

    if not in_sweep():
        check_values(cfg)
    logger = bind(cfg.logger, fn_args=("job",), key="logger")
    with logger(job_info(cfg, folder, "eval")) as run_log:
        check_values(cfg)
        summary = run(cfg, folder, run_log)
    return summary["acceptance_length"]


def run(cfg: DictConfig, folder: Path, run_log: RunLog) -> dict[str, Any]:
    """Decode, measure, and write everything to `folder`. Returns the summary."""
    from specdec import metrics
    from specdec.build import build_stages, load_models, plain_stages
    from specdec.experiments.decoding import decode_prompts
    from specdec.experiments.identity import identify
    from specdec.experiments.plots import plot_acceptance
    from specdec.experiments.tables import progress
    from specdec.runtime import use_threads

    seed_generators_(cfg.seed)
    bound = build_stages(cfg)
    prompts = load_prompts(cfg)
    models = load_models(cfg, uses_draft=bound.uses_draft)
    num_threads = use_threads(cfg.num_threads, models.target)
    num_outputs = cfg.sampling.num_samples * sum(len(p.turns) for p in prompts.prompts)
    with progress(f"decoding {prompts.name}", num_outputs) as advance:
        decoded = decode_prompts(
            cfg,
            models,
            bound,
            prompts,
            baseline=plain_stages(cfg) if cfg.measure_baseline else None,
            advance=advance,
        )
    summary = {
        **metrics.summarize(decoded.outputs, bound.num_draft_tokens),
        **speeds(decoded),
        **describe(cfg, models, bound, num_threads),
        **identify(cfg.target.path, models.tokenizer, prompts),
    }
    rows = metrics.per_prompt_rows(decoded.outputs, bound.num_draft_tokens)
    columns = metrics.per_prompt_columns(bound.num_draft_tokens)
    write_json(folder / "summary.json", summary)
    write_csv(folder / "per_prompt.csv", columns, rows)
    write_outputs(folder / "outputs.jsonl", decoded)
    plot_acceptance(decoded.outputs, summary, folder / "acceptance.png")
    log_run(run_log, summary, columns, rows, folder / "acceptance.png")
    print_summary(summary, folder)
    return summary


def seed_generators_(seed: int) -> None:
    """Set the global generators, which no stage of this project reads but a user's own may: a job
    of a sweep then gives the same as alone."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (it is the global one that is meant)
    torch.manual_seed(seed)


def load_prompts(cfg: DictConfig) -> Any:
    """The prompt set that `data` names."""
    return bind_prompts(cfg)()


def bind_prompts(cfg: DictConfig) -> Callable[[], Any]:
    from specdec.bind import bind

    node = plain(cfg.data)
    if node["path"] is None:
        del node["path"]
    return bind(node, key="data")


def speeds(decoded: Any) -> dict[str, Any]:
    """Output tokens a second, prefills included, and against plain decoding where it was run; the
    interval resamples the turns that the two took."""
    from specdec.metrics import quotient_interval, ratio

    (tokens, seconds), (plain_tokens, plain_seconds) = (
        ([stint.tokens for stint in stints], [stint.seconds for stint in stints])
        for stints in (decoded.stints, decoded.baseline_stints)
    )
    rate = ratio(sum(tokens), sum(seconds))
    baseline = ratio(sum(plain_tokens), sum(plain_seconds))
    return {
        "tokens_per_second": rate,
        "baseline_tokens_per_second": baseline,
        "speedup": ratio(rate, baseline) if rate and baseline else None,
        "speedup_ci95": quotient_interval((tokens, seconds), (plain_tokens, plain_seconds)),
        "decode_seconds": sum(seconds),
    }


def describe(cfg: DictConfig, models: Any, bound: Any, num_threads: int) -> dict[str, Any]:
    """What has to be known to repeat a run."""
    from hydra.core.hydra_config import HydraConfig

    from specdec.runtime import device_name
    from specdec.verify import traits_of

    return {
        "num_draft_tokens": bound.num_draft_tokens,
        "draft_sampling": bound.draft_sampling,
        "lossless": traits_of(bound.stages.verify).lossless,
        "device": str(models.device),
        "device_name": device_name(models.device),
        "dtype": str(models.dtype).removeprefix("torch."),
        "num_threads": num_threads if models.device.type == "cpu" else None,
        "choices": {
            group: choice
            for group, choice in HydraConfig.get().runtime.choices.items()
            if not group.startswith("hydra/")
        },
        "config": plain(cfg),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def write_csv(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_outputs(path: Path, decoded: Any) -> None:
    """One JSON line an output: where it comes from, its ids and its text."""
    with path.open("w", encoding="utf-8") as file:
        for output, text in zip(decoded.outputs, decoded.texts, strict=True):
            row = {
                "prompt_id": output.prompt_id,
                "turn": output.turn,
                "sample": output.sample,
                "finish_reason": output.finish_reason,
                "token_ids": list(output.token_ids),
                "text": text,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def log_run(
    run_log: RunLog,
    summary: dict[str, Any],
    columns: list[str],
    rows: list[dict[str, Any]],
    plot: Path,
) -> None:
    """The summary, acceptance over draft position on its own axis, the table and the plot."""
    run_log.define_axis("position", "per_position/*")
    pairs = zip(summary["per_position_conditional"], summary["per_position_joint"], strict=True)
    for position, (conditional, joint) in enumerate(pairs, 1):
        run_log.log(
            {
                "position": position,
                "per_position/conditional": conditional,
                "per_position/joint": joint,
            }
        )
    run_log.table("per_prompt", columns, [[row[c] for c in columns] for row in rows])
    run_log.image("acceptance", plot)
    run_log.summary({k: v for k, v in summary.items() if k != "config"})


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    from specdec.experiments.tables import interval, number, print_table

    within = interval(*summary["acceptance_length_ci95"])
    rows = [
        ["acceptance length", f"{number(summary['acceptance_length'])}  {within}"],
        ["1 + accepted / rounds", number(summary["mean_acceptance_length"])],
        ["acceptance rate", number(summary["acceptance_rate"])],
        ["kept by position", _listed(summary["per_position_joint"])],
        ["kept, all before it kept", _listed(summary["per_position_conditional"])],
        ["verify rounds", summary["num_verify_rounds"]],
        ["output tokens", f"{summary['num_output_tokens']} of {summary['num_outputs']} outputs"],
        ["repeated 8-grams", number(summary["repeated_8gram_share"])],
        ["bytes a round", number(summary["bytes_per_round"])],
        ["tokens a second", number(summary["tokens_per_second"], 1)],
    ]
    if summary["num_errors"]:
        rows.append(["ended in an error", f"{summary['num_errors']}: logits that are not numbers"])
    if summary["speedup"] is not None:
        rows.append(["plain tokens a second", number(summary["baseline_tokens_per_second"], 1)])
        within = interval(*summary["speedup_ci95"], digits=2)
        rows.append(["speedup", f"{number(summary['speedup'], 2)}  {within}"])
    verify, propose = (
        summary["config"][stage]["_target_"].rpartition(".")[2] for stage in ("verify", "propose")
    )
    title = f"{Path(summary['config']['target']['path']).name}, {summary['choices'].get('data')}: "
    title += f"propose={propose} K={summary['num_draft_tokens']} verify={verify}"
    title += f" on {summary['device']} {summary['dtype']}"
    print_table(title, ["", ""], rows)
    print(f"results: {folder}")


def _listed(values: list[float | None]) -> str:
    from specdec.experiments.tables import number

    return "  ".join(number(v) for v in values) or "-"


if __name__ == "__main__":
    main()
