"""What the training scripts need besides their loop: logs, vocabularies, evaluation."""

import csv
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from specdec import metrics
from specdec.build import BoundStages, Models
from specdec.errors import ConfigError
from specdec.experiments.decoding import decode_prompts
from specdec.experiments.heads import own_ids
from specdec.models.batch import Draft, Target
from specdec.models.eagle import make_vocab_map
from specdec.prompts import PromptSet
from specdec.training.data import load_dataset
from specdec.training.packing import Row, epoch_rows, make_row


class CsvLog:
    """A CSV file that grows by rows; columns are those of the first row.

    Args:
        keep_until: rows of an earlier session up to this step are kept, later ones dropped.
    """

    def __init__(self, path: Path, keep_until: int) -> None:
        self._path = path
        self._columns: list[str] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or [])
                if self._columns and "step" not in self._columns:
                    raise ConfigError(f"{path} is no log of steps; move it away")
                rows = [row for row in reader if _is_whole(row) and int(row["step"]) <= keep_until]
            self._write("w", rows)

    def add(self, row: dict[str, Any]) -> None:
        if not self._columns:
            self._columns = list(row)
            self._write("w", [])
        self._write("a", [row])

    def _write(self, mode: str, rows: list[dict[str, Any]]) -> None:
        with self._path.open(mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)


def _is_whole(row: dict[str, Any]) -> bool:
    """False for a row that was cut off while it was written."""
    return None not in row.values() and row["step"].isdecimal()


def bring_records(run: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy what an earlier run left, files and folders, to the one in which it goes on."""
    if run.resolve() == folder.resolve():
        return
    for name in names:
        if (run / name).is_dir():
            shutil.copytree(run / name, folder / name, dirs_exist_ok=True)
        elif (run / name).exists():
            shutil.copyfile(run / name, folder / name)


def heldout_rows(cfg: DictConfig, vocab_size: int) -> list[Row]:
    """Rows of `heldout_path`, the same every time; none without one."""
    if cfg.heldout_path is None:
        return []
    data = load_dataset(cfg.heldout_path, vocab_size=vocab_size)
    if cfg.heldout_tokens is not None and cfg.heldout_tokens < data.num_supervised.sum():
        data = load_dataset(cfg.heldout_path, num_tokens=cfg.heldout_tokens)
    packing = {"row_tokens": cfg.train_data.row_tokens, "seed": 0}
    rows = epoch_rows(data, epoch=0, **packing)
    return [make_row(data, samples, packing["row_tokens"]) for samples in rows]


def draft_rows(
    cfg: DictConfig,
    head: DictConfig,
    target: Target,
    ranking: Tensor,
    start: Draft | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(lm_head rows, d2t, t2d) of the vocabulary that the head is trained over.

    All of the target's with `draft.logits_from=shared`; with `target_rows` the first
    `draft.num_draft_rows` ids of the ranking, over which the target's distribution is renormalised;
    with an own lm_head the first `head.num_rows` likewise. A head to go on from that has a reduced
    lm_head of its own keeps its ids.
    """
    if start is not None and head.num_rows is not None:
        raise ConfigError(
            f"head.num_rows={head.num_rows} is for a new head, and draft.path={cfg.path} goes on "
            "from one; leave it null"
        )
    if start is not None and start.vocab_map and start.config.axes.logits_from == "shared":
        return target.lm_head[start.vocab_map.d2t], *start.vocab_map
    if head.num_rows is not None:
        if cfg.logits_from == "target_rows":
            raise ConfigError(
                f"head.num_rows={head.num_rows} makes an own lm_head, and "
                f"draft.logits_from={cfg.logits_from} takes the target's; set one of them"
            )
        rows = make_vocab_map(
            own_ids(ranking, head.num_rows).to(target.lm_head.device), target.lm_head.shape[0]
        )
        return target.lm_head[rows.d2t], rows.d2t, rows.t2d
    if cfg.logits_from != "target_rows":
        return target.lm_head[: target.vocab_size], None, None
    if cfg.num_draft_rows is None or not 0 < cfg.num_draft_rows <= len(ranking):
        raise ConfigError(
            f"draft.logits_from={cfg.logits_from} needs draft.num_draft_rows from 1 to "
            f"{len(ranking)}, not {cfg.num_draft_rows}"
        )
    rows = make_vocab_map(
        ranking[: cfg.num_draft_rows].sort().values.to(target.lm_head.device),
        target.lm_head.shape[0],
    )
    return target.lm_head[rows.d2t], rows.d2t, rows.t2d


def evaluate(
    cfg: DictConfig, models: Models, stages: BoundStages, prompts: PromptSet
) -> dict[str, Any]:
    """Acceptance of the head in `models` on a prompt set, decoded."""
    began = time.perf_counter()
    decoded = decode_prompts(cfg, models, stages, prompts)
    summary = metrics.summarize(decoded.outputs, stages.num_draft_tokens)
    low, high = summary["acceptance_length_ci95"]
    return {
        "acceptance_length": summary["acceptance_length"],
        "acceptance_length_low": low,
        "acceptance_length_high": high,
        "acceptance_length_low_repeat": summary["acceptance_length_low_repeat"],
        "repeated_8gram_share": summary["repeated_8gram_share"],
        **{f"kept_{j}": v for j, v in enumerate(summary["per_position_joint"], 1)},
        "seconds": time.perf_counter() - began,
    }
