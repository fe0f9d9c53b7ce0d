"""Functions that a configuration names, bound to their keywords."""

import difflib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from specdec.errors import ConfigError, did_you_mean


def bind(
    node: DictConfig | Mapping[str, Any],
    *,
    fn_args: Sequence[str] = (),
    offered: Mapping[str, Any] | None = None,
    key: str | None = None,
) -> partial:
    """Bind a config node's keywords to the function that its `_target_` names, once.

    Args:
        fn_args: names of the positional arguments that the caller will pass.
        offered: keywords that are passed only if the function takes them.
        key: the node's place in the configuration, for messages.

    Raises:
        ConfigError: the function is not found, or its signature lacks a keyword or a positional
            argument, needs a keyword that the node does not give, or has one of another type.
    """
    if isinstance(node, DictConfig):
        key = key or str(node._get_full_key(None)) or None
        values: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    else:
        values = dict(node)
    target = values.pop("_target_", None)
    keywords = {str(k): v for k, v in values.items() if k != "_partial_"}
    label = f"{key}._target_={target}" if key else str(target)
    at = f"{key}." if key else ""
    function = _locate(target, label)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{label} has no signature to check; wrap it in a function") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(fn_args) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(f"{label} must take the arguments ({', '.join(fn_args)})")
    passed = {p.name for p in positional[: len(fn_args)]}
    valid = [
        p.name
        for p in parameters
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in passed
    ]
    for name in keywords:
        if name not in valid and not takes_any:
            takes = f"it takes: {', '.join(valid)}" if valid else "it takes no keywords"
            hint = did_you_mean(name, valid)
            raise ConfigError(
                f"unknown key {at}{name}: {target} has no such keyword{hint} ({takes})"
            )
    for name, value in (offered or {}).items():
        if name in valid or takes_any:
            keywords.setdefault(name, value)
    missing = [
        p.name
        for p in parameters
        if p.name in valid and p.default is p.empty and p.name not in keywords
    ]
    if missing:
        raise ConfigError(
            f"{label} needs the keyword {missing[0]!r}; set {at}{missing[0]} "
            f"(it takes: {', '.join(valid)})"
        )
    hints = _type_hints(function)
    defaults = {p.name: p.default for p in parameters}
    for name, value in keywords.items():
        if name in hints and value != defaults.get(name) and not _fits(value, hints[name]):
            kind = _shown(hints[name])
            raise ConfigError(f"{at}{name}={value!r} is not a {kind}, as {label} takes")
    return partial(function, **keywords)


def _type_hints(function: Any) -> dict[str, Any]:
    """Of the arguments; none where they name what is not there."""
    try:
        return get_type_hints(function)
    except Exception:  # of somebody's own module: whatever evaluating them raises
        return {}


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of a configuration is of an annotated type; True where that is not a number,
    a string, a truth value, None or a choice of these."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if any(one not in (int, float, bool, str, NoneType) for one in kinds):
        return True
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def _shown(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _locate(target: Any, label: str) -> Any:
    """The callable that a dotted path names; its module is found on PYTHONPATH."""
    if not isinstance(target, str) or not target.strip("."):
        raise ConfigError(f"{label}: give the dotted path of a function")
    module_name, _, name = target.rpartition(".")
    if not module_name or target.startswith("."):
        raise ConfigError(f"{label} must be a dotted path, MODULE.FUNCTION")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(f"{label}: no module {error.name!r} on PYTHONPATH") from error
        raise ConfigError(f"{label}: importing {module_name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ConfigError(f"{label}: importing {module_name} failed: {kind}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        close = difflib.get_close_matches(name, public, n=1)
        hint = f"; did you mean {module_name}.{close[0]}?" if close else ""
        raise ConfigError(f"{label}: {module_name} has no function {name!r}{hint}")
    return function
