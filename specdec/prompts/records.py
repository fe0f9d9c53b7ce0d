"""Prompts as records, and the reader of JSON lines that every loader shares."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.errors import DataError

TURNS = ("first", "all")

# A row of a file and its number, from 1 -> the prompt that it describes.
ParseRow = Callable[[dict[str, Any], int], "Prompt"]


@dataclass(frozen=True)
class Prompt:
    """One conversation: what the user says in each turn that is to be run, in order."""

    prompt_id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class PromptSet:
    """Prompts in file order, and how `render` turns them into token ids."""

    name: str
    prompts: tuple[Prompt, ...]
    turns: str = "first"  # first | all; with first, every prompt holds one turn
    system_prompt: str | None = None  # None: what the chat template does by itself
    chat_template: str | None = None  # text of a Jinja template; None: the tokenizer's own


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and objects of a JSON-lines file, plain or gzip, but for blank lines.

    Raises:
        DataError: the file is absent, is no UTF-8 text, or a line is not a JSON object.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}; give the path of a .jsonl file")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse_object(line, f"{path} line {number}")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is not a text file of JSON lines: {error}") from error


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not valid JSON: {error.msg} at column {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        raise DataError(f"{where} is not JSON that can be read: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object but {type(row).__name__}")
    return row


def prompt_set(
    name: str,
    path: str | Path,
    parse_row: ParseRow,
    num_prompts: int | None,
    turns: str,
    system_prompt: str | None,
    chat_template: str | None,
) -> PromptSet:
    """Read, check and select the prompts of one file.

    Args:
        name: of the set, for tables and messages.
        parse_row: raises KeyError for a missing field and ValueError for a bad one.
        num_prompts: how many to keep, stratified by category; None keeps all.
        turns: first keeps one turn a prompt, all keeps every turn.
        chat_template: a path or the template itself.
    Raises:
        DataError: anything about the file or the arguments that cannot be used.
    """
    if turns not in TURNS:
        raise DataError(f"data.turns={turns!r} is unknown; choose one of {', '.join(TURNS)}")
    template = None if chat_template is None else load_template(chat_template)
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, row in read_rows(path):
        try:
            prompt = parse_row(row, number)
            _check_unicode(prompt)
        except KeyError as error:
            raise DataError(f"{path} line {number} has no field {error.args[0]}") from error
        except ValueError as error:
            raise DataError(f"{path} line {number}: {error}") from error
        if prompt.prompt_id in line_of:
            first = line_of[prompt.prompt_id]
            raise DataError(f"{path} lines {first} and {number} share the id {prompt.prompt_id!r}")
        line_of[prompt.prompt_id] = number
        prompts.append(prompt if turns == "all" else replace(prompt, turns=prompt.turns[:1]))
    if not prompts:
        raise DataError(f"{path} is empty; it must hold at least one prompt")
    chosen = tuple(stratified(prompts, num_prompts))
    return PromptSet(name, chosen, turns, system_prompt, template)


def _check_unicode(prompt: Prompt) -> None:
    """Raises ValueError for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    for text in (prompt.prompt_id, prompt.category, *prompt.turns):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{text!r:.60} is not valid Unicode: {error.reason}") from error


def stratified(prompts: Sequence[Prompt], num_prompts: int | None) -> list[Prompt]:
    """The same `num_prompts` prompts every time, from all categories in proportion, in file order.

    Categories take turns, each at a pace proportional to its size, and give their prompts from the
    top of the file; so a smaller choice is always part of a larger one.
    """
    if num_prompts is None:
        return list(prompts)
    if isinstance(num_prompts, bool) or not isinstance(num_prompts, int) or num_prompts < 1:
        raise DataError(f"data.num_prompts={num_prompts!r} must be a positive integer or null")
    if num_prompts > len(prompts):
        raise DataError(
            f"data.num_prompts={num_prompts} exceeds the {len(prompts)} prompts of the set; "
            "lower it, or use null for all"
        )
    members: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt.category, []).append(index)
    # The i-th of n prompts comes up after the share (i + 1/2) / n; ties go by first appearance.
    order = sorted(
        ((rank + 0.5) / len(indices), indices[0], index)
        for indices in members.values()
        for rank, index in enumerate(indices)
    )
    return [prompts[index] for index in sorted(index for *_, index in order[:num_prompts])]


def load_template(chat_template: str) -> str:
    """The text of a chat template that is given as a path or as the Jinja template itself."""
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise DataError(
            f"data.chat_template={chat_template!r} is neither a file nor a Jinja template"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"data.chat_template={chat_template!r} is not a text file") from error
