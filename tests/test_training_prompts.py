"""Training prompts and their overlap with evaluation sets."""

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from specdec import prompts
from specdec.errors import DataError
from specdec.prompts.decontaminate import evaluation_texts
from specdec.prompts.training import WEIGHTS, draw_template, fill, load_bank

SEEDS = str(Path(prompts.__file__).with_name("train_seeds.jsonl"))


def write_rows(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def texts(prompt_set: prompts.PromptSet) -> list[str]:
    return [turn for prompt in prompt_set.prompts for turn in prompt.turns]


# Overlap.


def test_ngrams_ignore_case_and_punctuation():
    words = [f"w{i}" for i in range(20)]
    train = ["x y z " + " ".join(words[3:16]), " ".join(words[3:15]), "", "Don't stop!"]
    evaluation = [", ".join(words).upper() + "?", "dont STOP"]
    shared = prompts.shared_ngrams(train, evaluation)
    assert shared == {0: " ".join(words[3:16]), 3: "dont stop"}
    assert prompts.shared_ngrams(train[:3], evaluation, n=12).keys() == {0, 1}


def test_contaminated_prompts_are_dropped(tmp_path):
    long = " ".join(f"w{i}" for i in range(30))
    path = write_rows(tmp_path / "a.jsonl", [{"turns": ["hello", long]}])
    other = write_rows(tmp_path / "b.jsonl", [{"question": "what is it"}])
    rows = [
        {"prompt_id": "1", "turns": ["fine", "see: " + long[10:80]]},
        {"prompt_id": "2", "prompt": "something else"},
        {"prompt_id": "3", "question": "What is it?"},
    ]
    assert [r["prompt_id"] for r in prompts.drop_contaminated(rows, [path, other])] == ["2"]
    assert prompts.drop_contaminated(rows, []) == rows


# Training prompts.


def own_evaluation_texts() -> list[str]:
    return [*texts(prompts.builtin(turns="all")), *texts(prompts.dev(turns="all"))]


def test_dev_shares_nothing_with_builtin():
    shared = prompts.shared_ngrams(
        texts(prompts.dev(turns="all")), texts(prompts.builtin(turns="all"))
    )
    assert shared == {}


def test_sources_of_training_prompts_share_nothing_with_the_own_sets():
    """Seeds, 5,000 draws of the bank and all follow-ups as they are, before anything is dropped."""
    bank, rng = load_bank(), random.Random(0)
    seeds = prompts.jsonl(SEEDS, turns="all")
    drawn = [draw_template(bank, rng)[1] for _ in range(5000)]
    follow_ups = [text for group in bank.follow_ups.values() for text in group]
    train = [*texts(seeds), *drawn, *follow_ups]
    assert prompts.shared_ngrams(train, own_evaluation_texts()) == {}


def test_training_prompts_repeat_by_seed_and_differ_from_each_other():
    rows = prompts.training_prompts(3000, seed=1)
    assert rows == prompts.training_prompts(3000, seed=1)
    assert len({row["turns"][0] for row in rows}) == len({r["prompt_id"] for r in rows}) == 3000
    other = prompts.training_prompts(3000, seed=2)
    shared = {row["prompt_id"] for row in rows} & {row["prompt_id"] for row in other}
    assert len(shared) < 0.35 * 3000  # above all the seeds, which are in both
    counts = Counter(row["category"] for row in rows)
    assert all(counts[category] > 100 for category in WEIGHTS)
    assert prompts.shared_ngrams([r["turns"][0] for r in rows], own_evaluation_texts()) == {}


def test_training_prompts_can_be_read_back(tmp_path):
    rows = prompts.training_prompts(50, seed=0, second_turns=0.5)
    loaded = prompts.jsonl(write_rows(tmp_path / "train.jsonl", rows), turns="all")
    assert [(p.prompt_id, list(p.turns)) for p in loaded.prompts] == [
        (row["prompt_id"], row["turns"]) for row in rows
    ]
    assert 10 < sum(len(row["turns"]) == 2 for row in rows) < 40


def test_gsm8k_is_mixed_in_without_what_an_evaluation_file_holds(tmp_path):
    long = " ".join(f"w{i}" for i in range(15))
    questions = [f"question number {i} of many" for i in range(200)]
    path = write_rows(
        tmp_path / "train.jsonl", [{"question": q, "answer": "1"} for q in [*questions, long]]
    )
    held_out = write_rows(
        tmp_path / "test.jsonl",
        [{"question": "Before " + long}, *({"question": q} for q in questions[:150])],
    )
    rows = prompts.training_prompts(400, 0, path, eval_paths=[held_out])
    drawn = {r["turns"][0] for r in rows if r["prompt_id"].startswith("gsm8k-")}
    assert len(rows) == 400
    assert len(drawn) == 40
    assert drawn <= set(questions[150:])
    with pytest.raises(DataError, match="line 1 has no text in the field question"):
        prompts.training_prompts(10, 0, write_rows(tmp_path / "bad.jsonl", [{"q": "1"}]))


def test_every_template_can_be_filled():
    bank, rng = load_bank(), random.Random(0)
    assert bank.templates.keys() == WEIGHTS.keys() == bank.follow_ups.keys()
    templates = [text for group in bank.templates.values() for text in group]
    assert len(templates) >= 60
    assert len(set(templates)) == len(templates)
    for template in templates:
        text = fill(template + "{opener}{limit}", bank.fillers, rng)
        assert "{" not in text
        assert "}" not in text


def test_slots_of_a_template():
    fillers = {"thing": ["a cat", "a dog"], "job": ["editor"], "nest": ["<{thing}>"]}
    seen = set()
    for seed in range(50):
        text = fill("{thing}|{thing#2}|{thing}", fillers, random.Random(seed))
        first, second, third = text.split("|")
        assert first == third != second
        low, high = map(int, fill("{int:2:4} {int#2:10:20:5}", {}, random.Random(seed)).split())
        seen.add((low, high))
    assert seen == {(low, high) for low in (2, 3, 4) for high in (10, 15, 20)}
    assert fill("{job#an}", fillers, random.Random(0)) == "an editor"
    text = fill("{nest} {thing}", fillers, random.Random(0))
    assert text in ("<a cat> a cat", "<a dog> a dog")


# Real files: SPECDEC_DATA is a folder that holds those below.

FILES = (
    "mt_bench/question.jsonl",
    "spec_bench/question.jsonl",
    "human_eval/HumanEval.jsonl",
    "gsm8k/test.jsonl",
)


@pytest.fixture
def published() -> list[Path]:
    if not os.environ.get("SPECDEC_DATA"):
        pytest.skip("SPECDEC_DATA names no folder of published prompt sets")
    return [Path(os.environ["SPECDEC_DATA"]) / file for file in FILES]


def test_own_text_is_not_in_published_sets(published):
    bank, rng = load_bank(), random.Random(0)
    own = [*own_evaluation_texts(), *texts(prompts.jsonl(SEEDS, turns="all"))]
    own += [draw_template(bank, rng)[1] for _ in range(5000)]
    assert prompts.shared_ngrams(own, evaluation_texts(published)) == {}


def test_training_prompts_avoid_published_sets(published):
    gsm8k_train = published[-1].with_name("train.jsonl")
    rows = prompts.training_prompts(20_000, 0, gsm8k_train, second_turns=0.2, eval_paths=published)
    assert len(evaluation_texts(published)) > 2000
    train = [turn for row in rows for turn in row["turns"]]
    assert prompts.shared_ngrams(train, evaluation_texts(published)) == {}
