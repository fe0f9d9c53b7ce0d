"""`make demo`: what speculation gains on this machine, in about two minutes.

    python experiments/demo.py [KEY=VALUE ...]

Plain decoding, n-gram drafts and the Eagle head at several K decode the same prompts, one request
at a time and in turns, so that the machine's ups and downs meet all of them. Overrides of the main
job's configuration may follow on the command line (`experiments/acceptance.py --help` lists them).
The table and its plot go to `outputs/demo/`.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.checks import check_keys, check_values, one_line
from specdec.config import register_schemas

FOLDER = Path("outputs/demo")
DECODE_SECONDS = 90.0  # no prompt is begun after it
LEAST_PROMPTS = 2
BASE = ("schedule.max_num_seqs=1", "sampling.max_tokens=64", "logger=none")


class Row(NamedTuple):
    """One line of the table."""

    label: str
    temperature: float
    overrides: tuple[str, ...]


class Decoder(NamedTuple):
    """A row with its configuration and an engine that is warm."""

    row: Row
    cfg: Any
    bound: Any
    engine: Any


def head(k: int, temperature: float = 0) -> Row:
    return Row(f"head, K={k}", temperature, (f"propose.num_draft_tokens={k}",))


PLAIN = "plain"
ROWS = (
    Row(PLAIN, 0, ("propose=none",)),
    Row("n-gram, K=4", 0, ("propose=ngram", "propose.num_draft_tokens=4")),
    *(head(k) for k in (1, 2, 4)),
    Row(PLAIN, 1, ("propose=none",)),
    head(2, temperature=1),
)
COLUMNS = ("drafts", "temperature", "acceptance length", "95% interval", "tokens/s", "speedup")


def run(overrides: Sequence[str] = (), seconds: float = DECODE_SECONDS) -> list[dict[str, Any]]:
    """Decode with every row, prompt after prompt, until `seconds` are over.

    Returns:
        One dict a row: drafts, temperature, tokens_per_second, speedup, acceptance numbers.
    """
    from specdec import runtime
    from specdec.build import build_stages, load_models
    from specdec.experiments.acceptance import load_prompts
    from specdec.experiments.tables import progress

    register_schemas()
    configs = [compose_row(row, overrides) for row in ROWS]
    models = load_models(configs[0], uses_draft=True)
    threads = runtime.use_threads(configs[0].num_threads, models.target)
    prompts = by_turns_of_category(load_prompts(configs[0]))
    decoders = [
        prepare(row, cfg, build_stages(cfg), models, prompts)
        for row, cfg in zip(ROWS, configs, strict=True)
    ]
    with progress("decoding, seconds", round(seconds)) as advance:
        outputs, taken = decode_in_turns(decoders, models, prompts, seconds, advance)
    num_prompts = len(outputs[0])
    dtype = str(models.dtype).removeprefix("torch.")
    title = f"{num_prompts} prompts, one at a time, {runtime.device_name(models.device)}, {dtype}"
    return report(outputs, taken, f"{title}, {threads} thread{'s' * (threads > 1)}")


def compose_row(row: Row, overrides: Sequence[str]) -> Any:
    from hydra import compose, initialize_config_module

    temperature = f"sampling.temperature={row.temperature}"
    with initialize_config_module("specdec.conf", version_base="1.3"):
        cfg = compose("config", overrides=[*BASE, *overrides, *row.overrides, temperature])
    check_keys(cfg)
    check_values(cfg)
    return cfg


def by_turns_of_category(prompts: Any) -> Any:
    """The prompts so ordered that any first part is spread over the categories."""
    from dataclasses import replace

    from specdec.prompts import stratified

    ordered = []
    for count in range(1, len(prompts.prompts) + 1):
        ordered += [p for p in stratified(prompts.prompts, count) if p not in ordered]
    return replace(prompts, prompts=tuple(ordered))


def prepare(row: Row, cfg: Any, bound: Any, models: Any, prompts: Any) -> Decoder:
    from specdec.build import build_engine
    from specdec.experiments.decoding import turn_tasks, warm_up

    requests = [task.request for task in turn_tasks(cfg, models, prompts, 0, {})]
    longest = max(len(r.prompt_ids) + r.max_tokens for r in requests)
    penalties = any(request.has_penalties for request in requests)
    engine = build_engine(cfg, models, bound, longest=longest, num_requests=1, penalties=penalties)
    warm_up(engine, requests[0])
    return Decoder(row, cfg, bound, engine)


def decode_in_turns(
    decoders: Sequence[Decoder],
    models: Any,
    prompts: Any,
    seconds: float,
    advance: Callable[..., None],
) -> tuple[list[list[Any]], list[float]]:
    """Each prompt through every decoder, the order turning by one from prompt to prompt.

    Returns:
        Outputs and decoding seconds of each decoder; all have the same prompts.
    """
    from specdec.experiments.decoding import interleave, output_of, turn_tasks

    tasks = [turn_tasks(d.cfg, models, prompts, 0, {}) for d in decoders]
    outputs: list[list[Any]] = [[] for _ in decoders]
    taken = [0.0] * len(decoders)
    began = time.perf_counter()
    for number in range(len(prompts.prompts)):
        passed = time.perf_counter() - began
        a_prompt = passed / max(number, 1)
        if number >= LEAST_PROMPTS and passed + a_prompt > seconds:
            break
        for turn in range(len(decoders)):
            index = (number + turn) % len(decoders)
            task = tasks[index][number]
            ((result,),), (((_, elapsed),),) = interleave([decoders[index].engine], [task.request])
            outputs[index].append(output_of(models.tokenizer, task, result))
            taken[index] += elapsed
            advance(f"prompt {number + 1}", elapsed)
    return outputs, taken


def report(outputs: list[list[Any]], taken: list[float], title: str) -> list[dict[str, Any]]:
    """Print the table; write it and its plot to `outputs/demo/`."""
    from specdec.experiments.acceptance import write_csv
    from specdec.experiments.plots import plot_demo
    from specdec.experiments.tables import number, print_table
    from specdec.metrics import summarize

    rates = [
        sum(len(o.token_ids) for o in row) / seconds
        for row, seconds in zip(outputs, taken, strict=True)
    ]
    plain = {row.temperature: rate for row, rate in zip(ROWS, rates, strict=True) if is_plain(row)}
    rows, lines = [], []
    for row, done, rate in zip(ROWS, outputs, rates, strict=True):
        summary = summarize(done, 0)
        low, high = summary["acceptance_length_ci95"]
        rows.append(
            {
                "drafts": row.label,
                "temperature": row.temperature,
                "acceptance_length": summary["acceptance_length"],
                "acceptance_length_ci95_low": low,
                "acceptance_length_ci95_high": high,
                "acceptance_rate": summary["acceptance_rate"],
                "repeated_8gram_share": summary["repeated_8gram_share"],
                "num_output_tokens": summary["num_output_tokens"],
                "tokens_per_second": rate,
                "speedup": rate / plain[row.temperature],
            }
        )
        length = number(summary["acceptance_length"], 2)
        interval = "-" if is_plain(row) else f"{number(low, 2)} to {number(high, 2)}"
        speedup = f"{rows[-1]['speedup']:.2f}"
        lines.append([row.label, row.temperature, length, interval, number(rate, 1), speedup])
    print_table(title, COLUMNS, lines)
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_csv(FOLDER / "demo.csv", list(rows[0]), rows)
    plot_demo(rows, title, FOLDER / "demo.png")
    print(f"plot: {FOLDER / 'demo.png'}   table: {FOLDER / 'demo.csv'}")
    return rows


def is_plain(row: Row) -> bool:
    return row.label == PLAIN


def main() -> None:
    """The command line: overrides, or `--help`."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__.strip())
        return
    try:
        run(sys.argv[1:])
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        sys.exit(f"error: {line}")


if __name__ == "__main__":
    main()
