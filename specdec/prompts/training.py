"""Training prompts by seed: written seeds, a bank of templates with fillers, GSM8K questions.

A template names its fillers in braces. `{thing}` draws from the group `thing`, and the same slot
within a prompt keeps its value; `{thing#2}` draws a different one. `{int:2:20}` draws an integer
in [2, 20], `{int#2:10:90:5}` another one in steps of 5. `{job#an}` puts the article before it.
A filler may hold slots itself.
"""

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from specdec.errors import DataError
from specdec.prompts.decontaminate import Ngram, evaluation_texts, first_collision, ngram_set
from specdec.prompts.records import read_rows

# Relative frequency of the groups of templates: the eight categories of MT-bench, and the rest.
WEIGHTS = {
    "writing": 17,
    "roleplay": 12,
    "reasoning": 8,
    "math": 9,
    "coding": 13,
    "extraction": 10,
    "stem": 11,
    "humanities": 10,
    "general": 10,
}
SEED_SHARE = 0.2  # at most, and each seed once
GSM8K_SHARE = 0.1  # at most, and each question once
LIMIT_SHARE = 0.25  # of the open-ended templates end in a wish about form or length
OPENER_SHARE = 0.15  # of the templates
OPEN_ENDED = ("writing", "roleplay", "stem", "humanities")
MAX_VAIN_DRAWS = 1000  # repeated or colliding prompts in a row

SLOT = re.compile(r"\{(\w+)(?:#(\w+))?((?::\d+)*)\}")


class Bank(NamedTuple):
    """Texts by group."""

    templates: Mapping[str, Sequence[str]]
    follow_ups: Mapping[str, Sequence[str]]
    fillers: Mapping[str, Sequence[str]]


def load_bank(name: str = "templates.jsonl") -> Bank:
    """A bank that comes with the package."""
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for _, row in read_rows(package_file(name)):
        kinds[row["kind"]][row["group"]].append(row["text"])
    return Bank(dict(kinds["template"]), dict(kinds["follow_up"]), dict(kinds["filler"]))


def training_prompts(
    num: int,
    seed: int,
    gsm8k_path: str | Path | None = None,
    *,
    second_turns: float = 0.0,
    eval_paths: Iterable[str | Path] = (),
) -> list[dict[str, Any]]:
    """`num` different prompts in random order; the same ones for the same arguments.

    None of them shares a 13-gram with the sets `builtin` and `dev` or with a file of `eval_paths`.

    Args:
        gsm8k_path: train.jsonl of GSM8K; a tenth of the prompts come from it.
        second_turns: share of the prompts, but for GSM8K's, that get a general second turn.
        eval_paths: JSON-lines files that training must not touch.
    Returns:
        rows `{"prompt_id", "category", "turns"}`, as the loader `jsonl` reads them.
    Raises:
        DataError: a file cannot be read, or the bank cannot give so many prompts.
    """
    rng = random.Random(seed)
    own = [package_file("builtin.jsonl"), package_file("dev.jsonl")]
    seen = ngram_set(evaluation_texts([*own, *eval_paths]))
    bank = load_bank()

    rows = _sample(_seed_rows(), round(num * SEED_SHARE), seen, rng)
    gsm8k = [] if gsm8k_path is None else _gsm8k_rows(gsm8k_path)
    gsm8k = _sample(gsm8k, round(num * GSM8K_SHARE), seen, rng)
    rows += _template_rows(bank, num - len(rows) - len(gsm8k), seen, rng)
    rows = [_with_second_turn(row, bank, second_turns, seen, rng) for row in rows] + gsm8k
    rng.shuffle(rows)
    return rows


def draw_template(bank: Bank, rng: random.Random) -> tuple[str, str]:
    """Group and text of one prompt from the bank."""
    (group,) = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
    template = rng.choice(bank.templates[group])
    if group in OPEN_ENDED and rng.random() < LIMIT_SHARE:
        template += " {limit}"
    if rng.random() < OPENER_SHARE:
        template = "{opener}" + template
    text = fill(template, bank.fillers, rng)
    return group, text[0].upper() + text[1:]


def fill(template: str, fillers: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Replace every slot of `template`; slots of one group that differ get different fillers."""
    values: dict[str, str] = {}
    used: dict[str, set[str]] = defaultdict(set)

    def value(match: re.Match[str]) -> str:
        slot = match[0]
        if slot not in values:
            group, label, bounds = match[1], match[2], match[3]
            if group == "int":
                low, high, *step = (int(bound) for bound in bounds[1:].split(":"))
                values[slot] = str(rng.randrange(low, high + 1, *step))
            else:
                chosen = rng.choice([text for text in fillers[group] if text not in used[group]])
                used[group].add(chosen)
                article = ("an " if chosen[0] in "aeiou" else "a ") if label == "an" else ""
                values[slot] = article + SLOT.sub(value, chosen)
        return values[slot]

    return SLOT.sub(value, template)


def _template_rows(
    bank: Bank, num: int, seen: frozenset[Ngram], rng: random.Random
) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    vain = 0
    while len(rows) < num:
        group, text = draw_template(bank, rng)
        if text in rows or first_collision(text, seen):
            vain += 1
            if vain > MAX_VAIN_DRAWS:
                raise DataError(f"the templates give {len(rows)} prompts, {num} are asked for")
            continue
        vain = 0
        rows[text] = _row("template", group, [text])
    return list(rows.values())


def _sample(
    rows: list[dict[str, Any]], most: int, seen: frozenset[Ngram], rng: random.Random
) -> list[dict[str, Any]]:
    """Up to `most` different rows that do not collide, in random order."""
    clean = {
        row["turns"][0]: row
        for row in rows
        if not any(first_collision(turn, seen) for turn in row["turns"])
    }
    return rng.sample(list(clean.values()), min(most, len(clean)))


def _with_second_turn(
    row: dict[str, Any], bank: Bank, share: float, seen: frozenset[Ngram], rng: random.Random
) -> dict[str, Any]:
    if rng.random() >= share:
        return row
    group = row["category"] if row["category"] in bank.follow_ups else "general"
    follow_ups = [text for text in bank.follow_ups[group] if not first_collision(text, seen)]
    return row | {"turns": [row["turns"][0], rng.choice(follow_ups)]}


def _seed_rows() -> list[dict[str, Any]]:
    rows = (row for _, row in read_rows(package_file("train_seeds.jsonl")))
    return [_row("seed", row["category"], row["turns"]) for row in rows]


def _gsm8k_rows(path: str | Path) -> list[dict[str, Any]]:
    rows = []
    for number, row in read_rows(path):
        if not isinstance(row.get("question"), str):
            raise DataError(f"{path} line {number} has no text in the field question")
        rows.append(_row("gsm8k", "math", [row["question"]]))
    return rows


def _row(source: str, category: str, turns: list[str]) -> dict[str, Any]:
    """The id is made of the text: the same prompt has it in every draw."""
    digest = hashlib.sha256(turns[0].encode()).hexdigest()[:12]
    return {"prompt_id": f"{source}-{digest}", "category": category, "turns": turns}


def package_file(name: str) -> str:
    return str(files("specdec.prompts") / name)
