"""Checks of a composed configuration: one line each, with the key, the value and the fix."""

import dataclasses
import hashlib
import json
import re
import traceback
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, get_type_hints

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.config import StageConfig
from specdec.errors import ConfigError, SpecdecError, did_you_mean
from specdec.values import CHECKS

NO_PROPOSAL = "specdec.propose.none.none"
_CHOSEN_TWICE = re.compile(r"Multiple values for (\S+)\. To override a value use '\S+ \S+ (\S+)'")
RENAMED = {"num_speculative_tokens": "num_draft_tokens"}  # other engines' names


def check_values(cfg: DictConfig) -> None:
    """Raises ConfigError for the first value, or pair of values, that cannot run.

    A value whose key is not in the schema is the affair of the function that takes it.
    """
    for key, (holds, what) in CHECKS.items():
        node, _, name = key.rpartition(".")
        parent = OmegaConf.select(cfg, node) if node else cfg
        if parent is None or name not in _field_names(OmegaConf.get_type(parent)):
            continue
        value = parent[name]
        if not holds(value):
            shown = "null" if value is None else value
            hint = did_you_mean(value, what.split(" ")) if isinstance(value, str) else ""
            raise ConfigError(f"{key}={shown} must be {what}{hint}")
    lowest, highest = (OmegaConf.select(cfg, f"propose.{m}_ngram") for m in ("min", "max"))
    if lowest is not None and highest is not None and lowest > highest:
        raise ConfigError(f"propose.min_ngram={lowest} exceeds propose.max_ngram={highest}")


def normalise_(cfg: DictConfig) -> None:
    """Record K = 0 for plain decoding, whatever the key says."""
    if OmegaConf.select(cfg, "propose._target_") == NO_PROPOSAL:
        cfg.propose.num_draft_tokens = 0


def check_keys(cfg: DictConfig) -> None:
    """Raises ConfigError for a key without a value, or one that no schema knows (`+key=value`).

    A stage's extra keys are left alone: `bind.bind` compares them with its function's keywords.
    """
    schema = OmegaConf.get_type(cfg)
    names = _field_names(schema)
    for key in cfg:
        is_stage = isinstance(schema, type) and issubclass(schema, StageConfig)
        if (names and key not in names and not is_stage) or key in RENAMED:
            raise ConfigError(unknown_key(_full_key(cfg, key), schema))
        if OmegaConf.is_missing(cfg, key):
            raise ConfigError(f"{_full_key(cfg, key)} has no value; give one")
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(node)):
            check_keys(node)


def _full_key(cfg: DictConfig, key: Any) -> str:
    return cfg._get_full_key(key)


def _field_names(schema: Any) -> list[str]:
    if not dataclasses.is_dataclass(schema):
        return []
    return [f.name for f in dataclasses.fields(schema)]


def check_hydra_overrides(settings: DictConfig) -> None:
    """The same for what the command line sets under `hydra.`, as `+hydra.typo=1` can."""
    for override in settings.overrides.hydra:
        node: Any = settings
        path = override.partition("=")[0].lstrip("+~").split(".")[1:]
        for depth, name in enumerate(path):
            schema = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
            names = _field_names(schema)
            if names and name not in names:
                raise ConfigError(unknown_key(".".join(["hydra", *path[: depth + 1]]), schema))
            node = node._get_node(name) if isinstance(node, DictConfig) else None


def unknown_key(full_key: str, schema: Any) -> str:
    """The line about a key that its schema does not have."""
    name = full_key.rpartition(".")[2]
    if name in RENAMED:
        return f"unknown key {full_key}; it is called {full_key[: -len(name)]}{RENAMED[name]} here"
    known = [v for v in _field_names(schema) if not v.startswith("_")]
    hint = did_you_mean(name, known) or _found_below(name, schema)
    if not hint and issubclass(schema, StageConfig):
        hint = f"; a keyword of your own function is added with +{full_key}="
    return f"unknown key {full_key}{hint} (known: {', '.join(known) or 'none'})"


def _found_below(name: str, schema: Any) -> str:
    """As `did_you_mean`, for a key that a node of the schema has."""
    for node, kind in get_type_hints(schema).items():
        if name in _field_names(kind):
            return f"; did you mean {node}.{name}?"
    return ""


def one_line(error: BaseException) -> str | None:
    """What to tell a user about an error that is theirs to mend; None for any other."""
    if isinstance(error, SpecdecError):
        return _fold(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = [o for o in error.options if not o.startswith("_")]
        hint = did_you_mean(name, options)
        if (group, name) == ("hydra/launcher", "joblib"):
            hint = "; install it with pip install 'specdec[sweep]'"
        return f"{group}={name} does not exist{hint} (known: {', '.join(options)})"
    if isinstance(error, OverrideParseException):
        why = _fold(error).partition(" See http")[0]
        return f"the override {error.override} cannot be read: {why}"
    if isinstance(error, ConfigCompositionException):
        twice = _CHOSEN_TWICE.match(str(error))
        if twice:
            group, name = twice.groups()
            return f"{group}={name} is chosen already; choose another with {group}=, without a +"
    if type(error) is ValueError and str(error).startswith("Config group override must be"):
        return _about_group(error)
    if isinstance(error, OSError) and error.filename is not None:
        return _about_file(error)
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(cause, OmegaConfBaseException):
        return _about_omegaconf(error, cause)
    if isinstance(error, HydraException):
        return _fold(error)
    return None


def _about_group(error: ValueError) -> str:
    """An override such as `verify=null`; Hydra's own message does not say which."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    override: Any = frame.f_locals.get("override")
    group = getattr(override, "key_or_group", "")
    what = f"{override.input_line}: " if group else ""
    folder = files("specdec.conf") / group
    options = sorted(f.name.removesuffix(".yaml") for f in folder.iterdir()) if group else []
    known = f" (known: {', '.join(options)})" if options else ""
    return f"{what}a group takes the name of one of its options{known}"


def _about_file(error: OSError) -> str:
    """A file or folder that the system refuses."""
    called = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    fix = "; choose another hydra.run.dir or hydra.sweep.dir" if "mkdir" in called else ""
    return f"{error.filename}: {error.strerror}{fix}"


def _about_omegaconf(error: BaseException, cause: OmegaConfBaseException) -> str:
    what = str(cause).partition("\n")[0]
    schema = cause.object_type
    if "not in" in what and cause.full_key and dataclasses.is_dataclass(schema):
        return unknown_key(cause.full_key, schema)
    key = f"{cause.full_key}: " if cause.full_key and cause.full_key not in what else ""
    lead = str(error).partition("\n")[0]
    return f"{key}{what}" if cause is error or not lead else f"{key}{what} ({lead})"


def _fold(error: BaseException) -> str:
    return " ".join(str(error).split())


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as a plain nested dict, every interpolation resolved."""
    container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted keys; empty mappings are left out."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def config_hash(config: dict[str, Any]) -> str:
    """Identifies a resolved configuration; equal for equal nested values."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
