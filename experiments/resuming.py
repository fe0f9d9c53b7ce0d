"""`resume=RUN` on a command line brings the overrides that RUN was started with."""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from yaml import YAMLError

from specdec.errors import ConfigError
from specdec.training.checkpoint import Progress, state_file
from specdec.training.loop import Budget

ADDED = {OverrideType.ADD: "+", OverrideType.FORCE_ADD: "++"}
LEFT_BEHIND = ("resume", "budget.stop_after_steps")  # of one session of a run
FIX = "take it away and give the run's overrides on the command line"


def with_overrides_of_run(arguments: Sequence[str]) -> list[str]:
    """The command line with the overrides of the run that it resumes, unless it gives them itself.

    Without `resume=`, with several of them (a sweep), or where the run has no record of Hydra's, it
    stays as it is: the state itself says what it goes with.

    Raises:
        ConfigError: the folder has no state to go on from, or its record is no list of overrides.
    """
    given = {index: parsed for index, text in enumerate(arguments) if (parsed := _parse(text))}
    runs = [o for o in given.values() if o.key_or_group == "resume" and not o.is_sweep_override()]
    run = runs[-1].value() if runs else None
    if run is None:
        return list(arguments)
    record = state_file(str(run)).parent / ".hydra" / "overrides.yaml"
    if not record.is_file():
        return list(arguments)
    old = {_key(parsed): parsed for text in _read(record) if (parsed := _parse(text))}
    line = list(arguments)
    for index, override in given.items():
        before = old.pop(_key(override), None)
        if before is not None and override.type is OverrideType.CHANGE:
            # what the earlier one added is not there without it
            line[index] = ADDED.get(before.type, "") + str(override.input_line)
    first = min(given)
    kept = [o.input_line for o in old.values() if o.key_or_group not in LEFT_BEHIND]
    return [*line[:first], *kept, *line[first:]]


def tell_if_spent(budget: Budget, start: Progress, run: str, folder: Path) -> None:
    """Lines for the user where the run that is resumed has nothing left to do.

    Args:
        folder: of the new session.
    """
    if budget.share(start) < 1:
        return
    in_place = folder.resolve() == Path(run).resolve()
    what = "its files are written again" if in_place else f"{folder} gets a copy of the run"
    print(
        f"resume={run}: the budget was spent after {start.step} steps, {start.tokens} tokens; "
        "raise budget.max_tokens, max_steps, max_seconds or epochs to go on\n"
        f"no step is left to take; {what}",
        flush=True,
    )


def _read(record: Path) -> list[str]:
    try:
        texts = OmegaConf.to_container(OmegaConf.load(record))
    except (YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{record} cannot be read; {FIX}") from error
    if texts and not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise ConfigError(f"{record} is not a list of overrides; {FIX}")
    return list(texts or ())


def _parse(text: str) -> Override | None:
    """An override; None for a flag, and for what Hydra itself will complain about."""
    if text.startswith("-"):
        return None
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _key(override: Override) -> tuple[str, str | None]:
    return override.key_or_group, override.package
