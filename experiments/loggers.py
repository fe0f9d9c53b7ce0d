"""Where a job's numbers go besides its folder: one W&B run a job, or nowhere.

A logger is a context manager bound from the `logger` group; it yields a `RunLog`.
"""

import http.client
import logging
import netrc
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from specdec.errors import ConfigError

MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
MAX_NAME = 128  # characters that W&B takes
PROBE_SECONDS = 5

log = logging.getLogger(__name__)
opened: set[str] = set()  # names of the folders of this process's W&B runs
_silent: set[str] = set()  # servers that left a run waiting: a sweep's later jobs do not wait


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

    Never prompts and never hangs: the mode is chosen first; a server that does not answer within
    some seconds leaves the run offline.

    Args:
        mode: online | offline | disabled; None takes WANDB_MODE, else online with a key.
    """
    # wandb's own error reports would reach for the server at exit, offline too.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    if not os.access(os.environ.get("HOME", ""), os.W_OK):  # as a service's; W&B would write there
        for name in ("XDG_CACHE_HOME", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
            os.environ.setdefault(name, str(job.folder / "wandb"))
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
    opened.add(Path(run.settings.sync_dir).name)

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

    if mode is not None and mode not in MODES:
        raise ConfigError(f"WANDB_MODE={mode} is unknown; use one of {', '.join(MODES)}")
    settings = wandb.Settings(init_timeout=20, finish_timeout=30, silent=True, console="off")
    wandb.setup(settings=wandb.Settings(silent=True))
    if mode == "online" and not has_key():
        log.warning("W&B has no key; set WANDB_API_KEY or log in; the run is kept offline")
    if mode in (None, "online"):
        mode = "online" if has_key() and _server_answers() else "offline"
    try:
        return wandb.init(mode=mode, settings=settings, **keywords)
    except wandb.errors.Error as error:
        if mode in ("offline", "disabled"):
            raise
        log.warning("W&B is out of reach (%s); the run is kept offline", _first_line(error))
        _silent.add(wandb.setup().settings.base_url)
        return wandb.init(mode="offline", settings=settings, **keywords)


def _server_answers() -> bool:
    import wandb

    url = wandb.setup().settings.base_url
    answers = url not in _silent and _answers(url)
    if not answers:
        log.warning("the W&B server %s does not answer; the run is kept offline", url)
    return answers


@lru_cache(maxsize=4)
def _answers(url: str) -> bool:
    """Whether anything, an error page too, comes back; a run started towards a silent server would
    hold up the program's end as well."""
    try:
        urllib.request.urlopen(f"{url}/healthz", timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # certificates are W&B's own affair
    except (OSError, http.client.HTTPException):
        return False
    return True


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
