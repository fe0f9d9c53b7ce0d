"""Overlap of training text with evaluation text, by word n-grams.

13 words is the length that GPT-3 (arXiv 2005.14165, appendix C) called a collision. Words are
lower-cased, apostrophes are dropped and all other punctuation separates words. A text of fewer
words counts as one n-gram, so that short texts collide when they are equal.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.prompts.records import read_rows

NGRAM_WORDS = 13
TEXT_FIELDS = ("turns", "prompt", "question")

Ngram = tuple[str, ...]

_APOSTROPHES = re.compile("['’`]")
_SEPARATORS = re.compile(r"[\W_]+")


def ngrams(text: str, n: int = NGRAM_WORDS) -> Iterator[Ngram]:
    """The n-grams of words of `text` in order; nothing for a text without words."""
    words = _SEPARATORS.sub(" ", _APOSTROPHES.sub("", text.lower())).split()
    if 0 < len(words) < n:
        yield tuple(words)
    for start in range(len(words) - n + 1):
        yield tuple(words[start : start + n])


def ngram_set(texts: Iterable[str], n: int = NGRAM_WORDS) -> frozenset[Ngram]:
    """All n-grams of `texts`: what `first_collision` looks up."""
    return frozenset(gram for text in texts for gram in ngrams(text, n))


def first_collision(text: str, seen: frozenset[Ngram], n: int = NGRAM_WORDS) -> str | None:
    """The first n-gram of `text` that is in `seen`, as words; None if there is none."""
    return next((" ".join(gram) for gram in ngrams(text, n) if gram in seen), None)


def shared_ngrams(
    train_texts: Sequence[str], eval_texts: Iterable[str], n: int = NGRAM_WORDS
) -> dict[int, str]:
    """Which training texts share an n-gram with any evaluation text, and the first one shared.

    Returns:
        index of the training text -> words of the n-gram; empty when nothing is shared.
    """
    seen = ngram_set(eval_texts, n)
    found = {index: first_collision(text, seen, n) for index, text in enumerate(train_texts)}
    return {index: gram for index, gram in found.items() if gram is not None}


def row_texts(row: Mapping[str, Any]) -> list[str]:
    """What the user says in a row of any format that the loaders read."""
    values = [row[field] for field in TEXT_FIELDS if field in row]
    return [text for value in values for text in (value if isinstance(value, list) else [value])]


def evaluation_texts(paths: Iterable[str | Path]) -> list[str]:
    """What the user says in evaluation files of JSON lines (`turns`, `prompt`, `question`).

    Raises:
        DataError: a file is absent or malformed.
    """
    return [text for path in paths for _, row in read_rows(path) for text in row_texts(row)]


def drop_contaminated(
    prompts: Sequence[dict[str, Any]], eval_paths: Iterable[str | Path], n: int = NGRAM_WORDS
) -> list[dict[str, Any]]:
    """`prompts` without those that share an n-gram with a prompt of an evaluation file.

    Args:
        prompts: rows with `turns`, `prompt` or `question`.
        eval_paths: JSON-lines files in any format that the loaders read. Spec-Bench contains all
            of MT-bench.
    """
    seen = ngram_set(evaluation_texts(eval_paths), n)
    return [
        row for row in prompts if not any(first_collision(text, seen, n) for text in row_texts(row))
    ]
