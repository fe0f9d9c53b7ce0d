"""Small pairs of a target and its head, from nothing: text, vocabulary, targets, heads, cards.

    python experiments/pairs.py path=outputs/pairs
    python experiments/pairs.py path=outputs/pairs stages=[export] export_path=models/pretrained

Every stage is a script of its own with a recipe of `conf/experiment`; its run folder lies below
`path`. A stage that is finished is not run again, one that was left is resumed, and the pairs run
side by side: small models leave most of a GPU idle.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from specdec.checks import check_values
from specdec.errors import ConfigError, SpecdecError
from specdec.experiments.cards import model_card
from specdec.experiments.jobs import hydra_script
from specdec.training.pair_config import register

register()

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("generate", "retokenize", "pretrain", "head", "quality", "export")
ON_GPU = ("generate", "pretrain", "head", "quality")  # by default, where there is one


class StageFailed(SpecdecError):
    """A stage's script ended with an error."""


class Stage(NamedTuple):
    """One run of a script."""

    name: str  # in `STAGES`
    label: str
    script: str  # below the repository's root
    folder: Path  # of the run
    overrides: list[str]
    done: str  # file of the folder that a finished run leaves


def make_pairs(cfg: DictConfig, folder: Path) -> None:
    """Run the stages that are asked for and not done yet, in order."""
    check_values(cfg)
    unknown = [name for name in cfg.stages if name not in STAGES]
    if unknown:
        raise ConfigError(f"stages={list(cfg.stages)}: known are {', '.join(STAGES)}")
    path = Path(cfg.path).absolute()
    check_gpu(cfg, path)
    path.mkdir(parents=True, exist_ok=True)
    for stage in (generate_stage(cfg, path), retokenize_stage(cfg, path)):
        if stage.name in cfg.stages:
            run_stage(cfg, stage)
    with ThreadPoolExecutor(max(1, min(cfg.workers, len(cfg.pairs)))) as pool:
        runs = [pool.submit(run_pair, cfg, path, pair) for pair in cfg.pairs]
        failures = [str(run.exception()) for run in runs if run.exception() is not None]
    if failures:
        raise StageFailed("; ".join(failures))
    if "export" in cfg.stages:
        for pair in cfg.pairs:
            export_pair(cfg, path, pair)


def check_gpu(cfg: DictConfig, path: Path) -> None:
    """Raises ConfigError where a stage that is to run would look for a GPU and there is none."""
    import torch

    pairs = [stage for pair in cfg.pairs for stage in pair_stages(cfg, path, pair)]
    left = {stage.name for stage in (generate_stage(cfg, path), *pairs) if not is_done(stage)}
    told = {name: [*cfg.overrides.all, *cfg.overrides[name]] for name in ON_GPU}
    free = [
        name
        for name in ON_GPU
        if name in left.intersection(cfg.stages)
        and not any(override.startswith("device=") for override in told[name])
    ]
    if free and not torch.cuda.is_available():
        fix = " ".join(f"\"overrides.{name}=['device=cpu']\"" for name in free)
        raise ConfigError(
            f"there is no GPU for {', '.join(free)}; {fix} makes the pairs here all the same, "
            "worse ones in the same seconds"
        )


def generate_stage(cfg: DictConfig, path: Path) -> Stage:
    overrides = [
        "+experiment=stories",
        f"target.path={cfg.writer}",
        f"path={path / 'text'}",
        f"responses.max_seconds={cfg.seconds.generate}",
    ]
    return Stage(
        "generate", "text", "experiments/generate.py", path / "generate", overrides, "summary.json"
    )


def retokenize_stage(cfg: DictConfig, path: Path) -> Stage:
    overrides = [
        f"source.paths=[{path / 'text'}]",
        f"source.tokenizer={cfg.writer}",
        f"path={path / 'data'}",
    ]
    return Stage(
        "retokenize", "vocabulary", "experiments/retokenize.py", path / "retokenize", overrides,
        "summary.json",
    )  # fmt: skip


def pair_stages(cfg: DictConfig, path: Path, pair: str) -> list[Stage]:
    """The stages of one pair, in order."""
    data, own = path / "data", path / pair
    target = f"target.path={own / 'pretrain' / 'target'}"
    common = [f"train_data.paths=[{data / 'train'}]", "logger=none"]
    heldout = f"{data / 'heldout'}"
    return [
        Stage(
            "pretrain", f"{pair} target", "experiments/pretrain.py", own / "pretrain",
            [f"+experiment={pair}_target", f"tokenizer={data / 'tokenizer'}", *common,
             f"heldout_path={heldout}", f"budget.max_seconds={cfg.seconds.pretrain}"],
            "summary.json",
        ),
        Stage(
            "head", f"{pair} head", "train_mtp.py", own / "head_run",
            [f"+experiment={pair}_head", target, *common,
             f"budget.max_seconds={cfg.seconds.head}"],
            "summary.json",
        ),
        Stage(
            "quality", f"{pair} quality", "experiments/quality.py", own / "quality",
            [target, f"draft.path={own / 'head_run' / 'head'}", f"text.heldout_path={heldout}",
             f"text.words_path={data / 'words.txt'}"],
            "quality.json",
        ),
    ]  # fmt: skip


def run_pair(cfg: DictConfig, path: Path, pair: str) -> None:
    for stage in pair_stages(cfg, path, pair):
        if stage.name in cfg.stages:
            run_stage(cfg, stage)


def run_stage(cfg: DictConfig, stage: Stage) -> None:
    """Run a stage's script unless it is done; its output goes to `output.txt` of its folder.

    Raises:
        StageFailed: it ended with an error.
    """
    if is_done(stage):
        print(f"{stage.label}: done before", flush=True)
        return
    stage.folder.mkdir(parents=True, exist_ok=True)
    overrides = [*stage.overrides, *cfg.overrides.all, *cfg.overrides[stage.name]]
    if (stage.folder / "state.pt").exists():
        overrides.append(f"resume={stage.folder}")
    command = [
        *(sys.executable, str(ROOT / stage.script)),
        *overrides,
        f"hydra.run.dir={stage.folder}",
    ]
    began = time.perf_counter()
    print(f"{stage.label}: started", flush=True)
    with (stage.folder / "output.txt").open("a", encoding="utf-8") as output:
        code = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        ).returncode  # fmt: skip
    lines = (stage.folder / "output.txt").read_text(encoding="utf-8").splitlines()
    if code:
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        raise StageFailed(f"{stage.label} failed: {last} (see {stage.folder / 'output.txt'})")
    print(f"{stage.label}: {time.perf_counter() - began:.0f} s", flush=True)


def is_done(stage: Stage) -> bool:
    """Whether the stage's run has ended as it should; a run that was left is not done."""
    file = stage.folder / stage.done
    return file.is_file() and json.loads(file.read_text()).get("finished", True)


def export_pair(cfg: DictConfig, path: Path, pair: str) -> None:
    """The pair as it ships, with its card, in `export_path`; and an archive beside it that holds
    the runs' records too."""
    own, root = path / pair, Path(cfg.export_path or path / "pretrained")
    folder = root / pair
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(own / "pretrain" / "target", folder)
    shutil.copytree(own / "head_run" / "head", folder / "head")
    records = {
        "quality": read_json(own / "quality" / "quality.json"),
        "pretrain": read_json(own / "pretrain" / "summary.json"),
        "head": read_json(own / "head_run" / "summary.json"),
        "data": read_json(path / "retokenize" / "summary.json"),
    }
    (folder / "README.md").write_text(model_card(pair, records), encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{pair}: {folder}, {size / 1e6:.2f} MB", flush=True)
    if cfg.archive_path is None:
        return
    Path(cfg.archive_path).mkdir(parents=True, exist_ok=True)
    with tarfile.open(Path(cfg.archive_path) / f"{pair}.tar", "w") as archive:
        archive.add(folder, arcname=pair)
        for run in ("pretrain", "head_run", "quality"):
            for file in sorted((own / run).iterdir()):
                if file.suffix in (".csv", ".json", ".txt"):
                    archive.add(file, arcname=f"records/{pair}/{run}/{file.name}")
        for run in ("generate", "retokenize"):
            file = path / run / "summary.json"
            if file.exists():
                archive.add(file, arcname=f"records/{run}.json")


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no {path}; run the stage before it")
    return json.loads(path.read_text(encoding="utf-8"))


main = hydra_script("pairs")(make_pairs)

if __name__ == "__main__":
    main()
