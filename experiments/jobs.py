"""What every Hydra script shares: one clear line for a user's error, a status file for every job, a
sweep that skips what is done and whose table is rebuilt after each job."""

import contextlib
import gc
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from specdec.checks import (
    check_hydra_overrides,
    check_keys,
    config_hash,
    normalise_,
    one_line,
    plain,
)
from specdec.config import register_schemas
from specdec.experiments import launching, locks, loggers
from specdec.experiments.launching import LOCK, STATUS
from specdec.experiments.loggers import JobInfo

log = logging.getLogger(__name__)


class JobFailed(Exception):
    """Carries a job's failure through Hydra after it was reported."""


class _WithoutHydraLine:
    """stderr without the line that Hydra adds to each failure; ours names the job already."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        if text.startswith("Error executing job with overrides:"):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def hydra_script(
    config_name: str,
    *,
    record: bool = True,
    arguments: Callable[[list[str]], list[str]] = list,
) -> Callable[[Callable[[DictConfig, Path], Any]], Callable[[], None]]:
    """Turn `task(cfg, folder)` into a script's `main()`.

    A user's error (a key, a value, a checkpoint, a file) is one line on stderr, any other error its
    traceback; the exit status is then 1. A run that is refused before it wrote anything leaves no
    folder; in a sweep a refused job keeps its own, and the other jobs still run. One process at a
    time writes to a job's folder: a run into a folder that is in use is refused, a sweep waits.

    Args:
        record: keep `status.json` and, in a sweep, the combined table; the folder is locked.
        arguments: what Hydra is to read for a command line.
    """

    def decorate(task: Callable[[DictConfig, Path], Any]) -> Callable[[], None]:
        def job(cfg: DictConfig) -> Any:
            if record:
                return run_job(task, cfg)
            check_keys(cfg)
            return task(cfg, Path(HydraConfig.get().runtime.output_dir))

        job.__module__ = task.__module__
        job.__qualname__ = job.__name__ = task.__name__

        def main() -> None:
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach the lines below
            register_schemas()
            launching.begin(record=record)
            script = hydra.main(
                version_base="1.3", config_path="pkg://specdec.conf", config_name=config_name
            )(job)
            try:
                sys.argv[1:] = arguments(sys.argv[1:])
                with contextlib.redirect_stderr(_WithoutHydraLine(sys.stderr)):
                    script()
            except JobFailed as failed:
                if failed.__cause__ is not None and one_line(failed.__cause__) is not None:
                    _leave_no_trace(reported=True)
                sys.exit(1)
            except launching.InUse as refused:
                print(f"error: {refused}", file=sys.stderr)
                sys.exit(1)
            except KeyboardInterrupt:
                sys.exit(130)
            except BrokenPipeError:  # whoever read the output has left, as `head` does
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(1)
            except Exception as error:
                line = one_line(error)
                if line is None:
                    raise
                _leave_no_trace(reported=False)
                print(f"error: {line}", file=sys.stderr)
                sys.exit(1)
            finally:
                launching.release()
                for folder, before in launching.started.items() if record else ():
                    if launching.records(folder) != before:  # else none of the jobs came to run
                        _print_sweep(folder)

        return main

    return decorate


def _leave_no_trace(*, reported: bool) -> None:
    """Undo what Hydra and `run_job` wrote where a task was refused before it wrote anything.

    Args:
        reported: `run_job` wrote the failure to the log; any other line there is to be kept.
    """
    for found in launching.found:
        quiet = reported or not launching.has_logged(found)
        if quiet and launching.is_as_found(found, loggers.opened):
            launching.put_back(found)


def run_job(task: Callable[[DictConfig, Path], Any], cfg: DictConfig) -> Any:
    """Run one job; leave `status.json` in its folder and, on an error, the traceback in its log.

    A sweep's job waits while another process runs it, and is skipped when its folder says that the
    same configuration is done. A job that is refused before it began leaves such a record alone.

    Raises:
        JobFailed: the task raised; what it raised was reported and is the cause.
    """
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    if not in_sweep():  # locked since before Hydra wrote there
        return _run(task, cfg, settings, folder, None)
    sweep = Path(settings.sweep.dir)
    job = os.path.relpath(folder, sweep)

    def tell(holder: str) -> None:
        print(f"job {job} is being run by {holder}: waiting for its end", flush=True)

    with locks.held(folder / LOCK, tell):
        return _run(task, cfg, settings, folder, sweep)


def _run(
    task: Callable[[DictConfig, Path], Any],
    cfg: DictConfig,
    settings: DictConfig,
    folder: Path,
    sweep: Path | None,
) -> Any:
    status = _new_status(settings, folder, sweep)
    before = None if sweep is None else read_status(folder)
    keeps = before is not None and before["status"] == "done"
    began = time.perf_counter()
    try:
        check_hydra_overrides(settings)
        check_keys(cfg)
        normalise_(cfg)
        status["config_hash"] = config_hash(plain(cfg))
        if before and keeps:
            keeps = False
            if before["config_hash"] == status["config_hash"]:
                print(f"job {status['job']} is done already: skipped")
                told = ("num", "overrides", "choices")
                status = {**before, **{name: status[name] for name in told}}
                return status["value"]
            print(f"job {status['job']} was done with another configuration: run again")
        _write_status(folder, status)
        value = task(cfg, folder)
        status["status"] = "done"
        if isinstance(value, int | float) and math.isfinite(value):
            status["value"] = value
        return value
    except Exception as error:
        status["status"] = "failed"
        status["error"] = one_line(error) or f"{type(error).__name__}: {error}"
        _report(error, status["job"] if sweep else None, status["overrides"])
        _forget_locals(error)
        raise JobFailed(status["error"]) from error
    except BaseException:
        status["status"] = "interrupted"
        raise
    finally:
        skipped = status["seconds"] is not None
        status["seconds"] = status["seconds"] or round(time.perf_counter() - began, 3)
        if not keeps:
            _write_status(folder, status)
        if not skipped:
            gc.collect()  # an engine's caches, before the next job looks at the free memory
            if sweep is not None:
                _rebuild(sweep)


def _new_status(settings: DictConfig, folder: Path, sweep: Path | None) -> dict[str, Any]:
    return {
        "status": "running",
        "job": folder.name if sweep is None else os.path.relpath(folder, sweep),
        "num": None if sweep is None else settings.job.num,
        "overrides": list(settings.overrides.task),
        "choices": {k: v for k, v in settings.runtime.choices.items() if "hydra/" not in k},
        "config_hash": None,
        "value": None,  # what the task returned, for sweepers
        "error": None,
        "process": locks.this_process(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": None,
    }


def read_status(folder: Path) -> dict[str, Any] | None:
    """A job's `status.json`; None where there is none or it cannot be read."""
    try:
        status = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) and "config_hash" in status else None


def _forget_locals(error: BaseException | None) -> None:
    """Let go of what the failed frames hold, models' caches too: Hydra keeps every error until the
    sweep's end."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _rebuild(sweep: Path) -> None:
    """A job's own end is never spoiled by the table's."""
    from specdec.experiments.sweep import rebuild

    try:
        rebuild(sweep)
    except Exception:
        log.exception("the table of %s was not written", sweep)


def job_info(cfg: DictConfig, folder: Path, job_type: str) -> JobInfo:
    """The current job as a logger sees it."""
    settings = HydraConfig.get()
    in_sweep = settings.mode == RunMode.MULTIRUN
    return JobInfo(
        folder=folder,
        config=plain(cfg),
        name=",".join(sorted(settings.overrides.task, key=len)) or settings.job.name,
        group=Path(settings.sweep.dir).name if in_sweep else None,
        job_type=job_type,
    )


def _print_sweep(folder: Path) -> None:
    from specdec.experiments.sweep import TABLE, print_rows, rebuild

    print_rows(rebuild(folder))
    print(f"table: {folder / TABLE}")


def in_sweep() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def _write_status(folder: Path, status: dict[str, Any]) -> None:
    write_json(folder / STATUS, status)


def _report(error: Exception, job: str | None, overrides: list[str]) -> None:
    """The error on stderr, and its traceback in the job's own log."""
    text = "".join(traceback.format_exception(error))
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, text, (), None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
    line = one_line(error)
    where = f"job {job} ({', '.join(overrides)}): " if job else ""
    print(f"error: {where}{line}" if line else f"{where}\n{text}".lstrip(), file=sys.stderr)
