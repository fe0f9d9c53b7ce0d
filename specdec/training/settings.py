"""What a saved state was made with: whether a run may go on under other settings."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec.checks import flatten
from specdec.errors import ConfigError


class Settings(NamedTuple):
    """A configuration as a state keeps it."""

    values: dict[str, Any]  # by dotted key
    contents: dict[str, str]  # of a key that names files: their fingerprint, which then counts


def settings_of(config: Mapping[str, Any], contents: Mapping[str, str]) -> Settings:
    """Of a plain nested configuration."""
    return Settings(flatten(config), dict(contents))


def differences(saved: Settings, now: Settings) -> list[str]:
    """Keys whose values, or the contents of what they name, differ; an absent key is null. A
    function's name comes before its keywords."""
    keys = dict.fromkeys(
        key for found in (saved, now) for part in found for key in part if _differ(saved, now, key)
    )
    return sorted(keys, key=lambda key: not key.endswith("._target_"))


def _differ(saved: Settings, now: Settings, key: str) -> bool:
    if key in saved.contents and key in now.contents:
        return saved.contents[key] != now.contents[key]
    return saved.values.get(key) != now.values.get(key)


def below(key: str, parents: Sequence[str]) -> bool:
    """Whether a dotted key is one of `parents` or lies below one."""
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def told(saved: Settings, now: Settings, key: str) -> str:
    """The difference in words, with the key and both values."""
    old, new = (_shown(found.values.get(key)) for found in (saved, now))
    return f"{key}={new} was {old} before" if old != new else f"what {key}={new} names has changed"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def check_same(saved: Settings, now: Settings, *, free: Sequence[str], run: Any) -> None:
    """Raises ConfigError for a difference outside of `free`: the state would mean another thing."""
    keys = [key for key in differences(saved, now) if not below(key, free)]
    if not keys:
        return
    more = ", ".join(keys[1:4]) + (", ..." if len(keys) > 4 else "")
    raise ConfigError(
        f"resume={run}: {told(saved, now, keys[0])}, and the saved state does not go with it"
        f"{f' (nor with {more})' if more else ''}; "
        "leave it as it was, or start a new run without resume"
    )
