"""Where the jobs of a sweep put their files, so that the same sweep run again finds them.

`conf/jobs.yaml` brings both parts into every script's configuration. Importing this module
registers the resolver, also in the processes that a parallel launcher starts.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.checks import config_hash, plain

MAX_NAME = 80  # characters of the readable part
EXCLUDED = "hydra.job.config.override_dirname.exclude_keys"

started: list[Path] = []  # sweep folders of this process's current script


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


class SweepStart(Callback):
    """Hydra calls this in the launching process before the first job, whatever the launcher."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        started.append(Path(config.hydra.sweep.dir))
        parsed = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        fixed = [o.get_key_element() for o in parsed if not o.is_sweep_override()]
        if fixed:
            keys = ",".join(f"'{key}'" for key in fixed)
            config.hydra.overrides.hydra.append(f"{EXCLUDED}=[{keys}]")
