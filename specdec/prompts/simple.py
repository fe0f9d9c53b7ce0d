"""Prompts in simple words by seed: children's stories, and questions with short answers.

The templates and fillers are in `simple.jsonl`, in the form that `training` describes; they make
hundreds of millions of different prompts.
"""

import hashlib
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specdec.errors import DataError
from specdec.prompts.decontaminate import evaluation_texts, first_collision, ngram_set
from specdec.prompts.records import Prompt, PromptSet, load_template, stratified
from specdec.prompts.training import MAX_VAIN_DRAWS, fill, load_bank, package_file

STORY_SHARE = 0.65  # the rest are questions
HELDOUT_SHARE = 0.02  # of all prompts, by their texts
NUM_HELDOUT = 120  # prompts of the set `simple`
BUCKETS = 10_000


def simple(
    path: str | None = None,
    *,
    num_prompts: int | None = None,
    turns: str = "first",
    system_prompt: str | None = None,
    chat_template: str | None = None,
) -> PromptSet:
    """120 prompts in simple words, none of which `experiments/retokenize.py` lets into training."""
    if path is not None:
        raise DataError(f"data=simple makes its own prompts; read {path} with data=jsonl")
    rows = [row for row in simple_prompts(60 * NUM_HELDOUT, 1) if is_held_out(row["turns"][0])]
    prompts = [
        Prompt(row["prompt_id"], row["category"], tuple(row["turns"])) for row in rows[:NUM_HELDOUT]
    ]
    template = None if chat_template is None else load_template(chat_template)
    chosen = tuple(stratified(prompts, num_prompts))
    return PromptSet("simple", chosen, turns, system_prompt, template)


def simple_prompts(
    num: int, seed: int, *, eval_paths: Iterable[str | Path] = ()
) -> list[dict[str, Any]]:
    """`num` different prompts in random order; the same ones for the same arguments.

    None of them shares a 13-gram with the sets `builtin` and `dev` or with a file of `eval_paths`.

    Returns:
        rows `{"prompt_id", "category", "turns"}`, as the loader `jsonl` reads them.

    Raises:
        DataError: a file cannot be read, or the bank cannot give so many prompts.
    """
    rng = random.Random(seed)
    bank = load_bank("simple.jsonl")
    own = [package_file("builtin.jsonl"), package_file("dev.jsonl")]
    evaluation = ngram_set(evaluation_texts([*own, *eval_paths]))
    rows: dict[str, dict[str, Any]] = {}
    vain = 0
    while len(rows) < num:
        group = "story" if rng.random() < STORY_SHARE else "question"
        text = " ".join(fill(rng.choice(bank.templates[group]), bank.fillers, rng).split())
        text = text[0].upper() + text[1:]
        if text in rows or first_collision(text, evaluation):
            vain += 1
            if vain > MAX_VAIN_DRAWS:
                raise DataError(f"the templates give {len(rows)} prompts, {num} are asked for")
            continue
        vain = 0
        prompt_id = f"simple-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        rows[text] = {"prompt_id": prompt_id, "category": group, "turns": [text]}
    return list(rows.values())


def is_held_out(text: str, share: float = HELDOUT_SHARE) -> bool:
    """Whether a prompt is kept from training: decided by its text alone, so that every answer to
    it falls on the same side. A larger share holds out these prompts too."""
    digest = hashlib.sha256(f"held out/{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS < share * BUCKETS
