"""Where a job's numbers go besides its folder: one W&B run a job, or nowhere.

A logger is a context manager bound from the `logger` group; it yields a `RunLog`.
"""

import logging
import netrc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

MAX_NAME = 128  # characters that W&B takes

log = logging.getLogger(__name__)


class JobInfo(NamedTuple):
    """What a logger is told about the job."""

    folder: Path  # the run folder
    config: dict[str, Any]  # plain and resolved
    name: str  # the overrides, the short ones first
    group: str | None  # the sweep folder's name
    job_type: str  # train | eval | bench | serve


class RunLog(NamedTuple):
    """What a job can log. `log` takes one row; rows keep the order of the calls, and an axis is a
    column of the row (`define_axis`), never a step."""

    log: Callable[[dict[str, Any]], None]
    define_axis: Callable[[str, str], None]  # (axis column, pattern of the columns over it)
    summary: Callable[[dict[str, Any]], None]
    table: Callable[[str, Sequence[str], Sequence[Sequence[Any]]], None]
    image: Callable[[str, Path], None]


@contextmanager
def no_run(job: JobInfo) -> Iterator[RunLog]:
    """Logs nothing; the run folder has everything."""

    def ignore(*_: Any) -> None:
        return None

    yield RunLog(ignore, ignore, ignore, ignore, ignore)


@contextmanager
def wandb_run(
    job: JobInfo,
    *,
    project: str = "specdec",
    entity: str | None = None,
    mode: str | None = None,
    tags: Sequence[str] = (),
) -> Iterator[RunLog]:
    """One W&B run, finished whatever happens, with a non-zero exit code after an error.

    Never prompts and never hangs: the mode is chosen first, a silent server costs 20 seconds and
    then the run is offline.

    Args:
        mode: online | offline | disabled; None takes WANDB_MODE, else online with a key.
    """
    import wandb

    run = _start(
        mode or os.environ.get("WANDB_MODE"),
        project=project,
        entity=entity,
        tags=list(tags),
        config=job.config,
        group=job.group,
        job_type=job.job_type,
        name=job.name[:MAX_NAME],
        dir=str(job.folder),
        reinit="finish_previous",
    )

    def define_axis(axis: str, pattern: str) -> None:
        run.define_metric(axis)
        run.define_metric(pattern, step_metric=axis)

    exit_code = 1
    try:
        yield RunLog(
            log=lambda row: run.log(row),
            define_axis=define_axis,
            summary=lambda values: run.summary.update(values),
            table=lambda name, columns, rows: run.log(
                {name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}
            ),
            image=lambda name, path: run.log({name: wandb.Image(str(path))}),
        )
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)


def _start(mode: str | None, **keywords: Any) -> Any:
    import wandb

    settings = wandb.Settings(init_timeout=20, finish_timeout=30, silent=True, console="off")
    if mode in (None, "online") and not has_key():
        mode = "offline"
    try:
        return wandb.init(mode=mode or "online", settings=settings, **keywords)
    except wandb.errors.Error as error:
        if mode in ("offline", "disabled"):
            raise
        log.warning("W&B is out of reach (%s); the run is kept offline", _first_line(error))
        return wandb.init(mode="offline", settings=settings, **keywords)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def has_key() -> bool:
    """Whether W&B credentials exist: in the environment, W&B's settings or a netrc file."""
    import wandb

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.setup().settings
    if settings.api_key:
        return True
    host = urlsplit(settings.base_url).hostname or ""
    named = os.environ.get("NETRC")
    paths = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in paths:
        try:
            if path.is_file() and netrc.netrc(path).authenticators(host):
                return True
        except (netrc.NetrcParseError, OSError):
            continue
    return False
