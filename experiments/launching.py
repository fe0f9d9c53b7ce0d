"""Where the jobs of a sweep put their files, so that the same sweep run again finds them; and how a
folder was before Hydra wrote to it, so that a refused run can leave it so.

`conf/jobs.yaml` brings the parts into every script's configuration. Importing this module registers
the resolver, also in the processes that a parallel launcher starts.
"""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.checks import config_hash, plain
from specdec.experiments.locks import Lock, acquire, holder
from specdec.experiments.locks import release as release_lock

MAX_NAME = 80  # characters of the readable part
EXCLUDED = "hydra.job.config.override_dirname.exclude_keys"

STATUS = "status.json"
LOCK = ".lock"  # of the process that runs the job in its folder
LOGGED = "wandb"  # folder of a logger that opens before the task is done checking


class Found(NamedTuple):
    """A run's or a sweep's folder before Hydra wrote to it."""

    folder: Path
    made: tuple[Path, ...]  # folders that were not there, the innermost first
    records: dict[Path, bytes | None]  # what Hydra and a job's record write; None: was not there
    others: dict[str, int]  # the folder's other entries, and when they changed
    had_log: bool  # whether a logger's folder was there


class InUse(BaseException):
    """Another process writes to the run's folder. Hydra would go on after an `Exception` in a
    callback, with a warning."""


# Of this process's current script:
started: dict[Path, dict[Path, int]] = {}  # sweep folders, and when their jobs' records had changed
found: list[Found] = []  # the folders
recorded: list[bool] = []  # whether it keeps a record in its run's folder
_held: list[Lock] = []  # of that folder, from before Hydra writes there


def begin(*, record: bool) -> None:
    """A script starts: forget the last one's folders."""
    started.clear()
    found.clear()
    recorded[:] = [record]


def release() -> None:
    """Let another process have the run's folder."""
    while _held:
        release_lock(_held.pop())


def records(sweep: Path) -> dict[Path, int]:
    """A sweep's jobs' records, and when each changed; a job that is skipped changes its own too."""
    return {path: path.stat().st_mtime_ns for path in sweep.rglob(STATUS)}


def job_folder(sweep: str, overrides: Sequence[str], fixed: Sequence[str], _root_: Any) -> str:
    """Name of a job's folder: its swept values and a hash of its resolved configuration.

    A folder of the same hash that is there already is kept, whatever its readable part.

    Args:
        overrides: of the job, `key=value` each.
        fixed: keys that have one value throughout the sweep.
        _root_: the whole configuration, from OmegaConf.
    """
    digest = _digest(_root_, overrides)
    for folder in sorted(Path(sweep).glob(f"*_{digest}")):
        return folder.name
    parts = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in fixed:
            parts.append("-".join(map(_clean, readable(key, value))))
    return f"{'_'.join(parts)[:MAX_NAME] or 'job'}_{digest}"


def readable(key: str, value: str) -> tuple[str, str]:
    """A setting in few words: the key's last part; of a group's function the two names."""
    if key.endswith("._target_"):
        key, value = key.removesuffix("._target_"), value.rpartition(".")[2]
    return key.rpartition(".")[2], value


def _digest(root: Any, overrides: Sequence[str]) -> str:
    config = root.copy()
    OmegaConf.set_struct(config, False)
    config.pop("hydra", None)
    try:
        return config_hash(plain(config))[:6]
    except (OmegaConfBaseException, TypeError):  # the job itself says what is wrong with it
        return hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:6]


def _clean(text: str) -> str:
    """Only what a path and an override take without quotes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "empty"


OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


def look(folder: Path, config: DictConfig) -> Found:
    """Remember how a folder is that Hydra is about to write to.

    Args:
        folder: absolute and without `..`, which could name what is there by what is not.
    """
    names = ["config.yaml", "hydra.yaml", "overrides.yaml"]
    records = [folder / (config.hydra.output_subdir or ".hydra") / name for name in names]
    records += [folder / name for name in (f"{config.hydra.job.name}.log", STATUS)]
    records += [folder / "multirun.yaml"]
    folders = {*records[0].parents, folder, *folder.parents}
    return Found(
        folder,
        tuple(sorted((path for path in folders if not path.exists()), reverse=True)),
        {path: path.read_bytes() if path.is_file() else None for path in records},
        _others(folder, records),
        (folder / LOGGED).exists(),
    )


def _others(folder: Path, records: Iterable[Path]) -> dict[str, int]:
    if not folder.is_dir():
        return {}
    own = {path.relative_to(folder).parts[0] for path in records if path.is_relative_to(folder)}
    own.add(LOCK)
    return {p.name: p.lstat().st_mtime_ns for p in folder.iterdir() if p.name not in own}


def is_as_found(before: Found, logged: Container[str]) -> bool:
    """Whether nothing but Hydra, the job's record and a new logger wrote to the folder.

    Args:
        logged: names of the logger's folders that this process made; beside another's nothing is.
    """
    others = _others(before.folder, before.records)
    if not before.had_log and others.pop(LOGGED, None) is not None:
        runs = [p.name for p in (before.folder / LOGGED).glob("*run-*") if not p.is_symlink()]
        if not runs or not all(name in logged for name in runs):
            return False
    return others == before.others


def has_logged(before: Found) -> bool:
    """Whether the script's log has grown, by its own lines or another process's."""
    logs = [path for path in before.records if path.suffix == ".log"]
    return any(p.is_file() and p.read_bytes() != (before.records[p] or b"") for p in logs)


def put_back(before: Found) -> None:
    """Take away, or write back, what they wrote; what the system refuses stays."""
    if not before.had_log:
        shutil.rmtree(before.folder / LOGGED, ignore_errors=True)
    for path, content in before.records.items():
        with contextlib.suppress(OSError):  # not written after all: a file is in the folder's place
            if content is None:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != content:
                path.write_bytes(content)
    release()  # its file lies in the folder
    for path in before.made:
        with contextlib.suppress(OSError):  # not made after all, or another run writes there too
            path.rmdir()


def _lock_(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lock = acquire(folder / LOCK, wait=False)
    if lock is None:
        raise InUse(
            f"hydra.run.dir={folder} is being written by {holder(folder / LOCK)}; "
            "wait for its end or give another hydra.run.dir"
        )
    _held.append(lock)


class JobsStart(Callback):
    """Hydra calls this in the launching process, before it writes anything, whatever launches."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)  # the folder's name may be made of Hydra's values
        try:
            folder = Path(config.hydra.run.dir).resolve()
            found.append(look(folder, config))
            if any(recorded):
                _lock_(folder)
        except (OmegaConfBaseException, OSError):
            pass  # Hydra itself says what is wrong with the folder
        finally:
            HydraConfig.instance().cfg = before

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        sweep = Path(config.hydra.sweep.dir)
        started[sweep] = records(sweep)
        found.append(look(Path(config.hydra.sweep.dir).resolve(), config))
        parsed = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        fixed = [o.get_key_element() for o in parsed if not o.is_sweep_override()]
        if fixed:
            keys = ",".join(f"'{key}'" for key in fixed)
            config.hydra.overrides.hydra.append(f"{EXCLUDED}=[{keys}]")
