"""Acceptance numbers against hand-counted rounds and known distributions."""

import hashlib
import json

import numpy as np
import pytest

from specdec import metrics
from specdec.metrics import Output

M1 = [(3, 3, 4), (3, 1, 2), (3, 0, 1), (1, 1, 2)]  # (drafted, accepted, committed)


def output(rounds, prompt_id="a", turn=0, sample=0, token_ids=None, category="math"):
    if token_ids is None:
        token_ids = tuple(range(1 + sum(r[2] for r in rounds)))
    return Output(prompt_id, turn, category, sample, token_ids, rounds, 10, 0.5, "length")


def test_ragged_rounds_give_the_published_numbers():
    counts = metrics.count_rounds(M1)
    assert (counts.rounds, counts.drafted, counts.accepted, counts.committed) == (4, 10, 5, 9)
    values = metrics.acceptance(counts)
    assert values["acceptance_rate"] == 0.5
    assert values["mean_acceptance_length"] == 2.25
    assert values["acceptance_length"] == 2.25
    assert values["per_position_joint"] == [3 / 4, 1 / 3, 1 / 3]
    assert values["per_position_conditional"] == [3 / 4, 1 / 2, 1.0]


def test_no_rounds_divide_nothing():
    values = metrics.acceptance(metrics.count_rounds([]))
    assert values["acceptance_length"] is None
    assert values["mean_acceptance_length"] is None
    assert values["acceptance_rate"] is None
    assert values["per_position_joint"] == values["per_position_conditional"] == []
    assert values["num_verify_rounds"] == values["num_drafted"] == values["num_accepted"] == 0
    summary = metrics.summarize([output([], token_ids=(5,))], 4)
    assert summary["acceptance_length"] is None
    assert summary["acceptance_length_ci95"] == [None, None]
    assert summary["num_output_tokens"] == 1
    assert summary["per_position_joint"] == [None] * 4
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_rounds_without_drafts_count_as_rounds():
    values = metrics.acceptance(metrics.count_rounds([(0, 0, 1), (2, 2, 3)], num_positions=3))
    assert values["acceptance_length"] == 2.0
    assert values["mean_acceptance_length"] == 2.0
    assert values["per_position_joint"] == [1.0, 1.0, None]


def test_a_round_trimmed_by_the_end_of_text_decides_nothing_past_it():
    # Four drafts verified, the second is the end of text: two committed, no third was judged.
    counts = metrics.count_rounds([(4, 2, 2), (4, 2, 3)])
    assert counts.drafted_at.tolist() == [2, 2, 2, 2]
    assert counts.tried_at.tolist() == [2, 2, 1, 0]
    values = metrics.acceptance(counts)
    assert values["per_position_conditional"] == [1.0, 1.0, 0.0, None]
    assert values["per_position_joint"] == [1.0, 1.0, 0.0, 0.0]
    assert values["acceptance_length"] == 2.5
    assert values["mean_acceptance_length"] == 3.0


def test_pooled_length_is_a_ratio_of_sums():
    outputs = [output([(1, 1, 2)] * 9, "a"), output([(1, 0, 1)], "b")]
    assert metrics.summarize(outputs, 1)["acceptance_length"] == pytest.approx(19 / 10)


def test_interval_has_the_width_and_the_cover_of_a_95_percent_one():
    rng = np.random.default_rng(7)
    covered, widths, expected = 0, [], []
    for trial in range(40):
        rounds = rng.integers(20, 60, size=60)
        committed = [r + rng.binomial(r, 0.4) for r in rounds]
        low, high = metrics.bootstrap_interval(committed, rounds, seed=trial)
        covered += low <= 1.4 <= high
        widths.append(high - low)
        expected.append(2 * 1.96 * np.sqrt(0.4 * 0.6 / rounds.sum()))
    assert np.mean(widths) == pytest.approx(np.mean(expected), rel=0.05)
    assert covered >= 34  # of 40; 95% give 38 and a standard error of 1.4


def test_interval_is_over_prompts_and_not_over_outputs():
    few = [output([(1, i % 2, 1 + i % 2)] * 5, prompt_id=f"p{i}") for i in range(6)]
    copies = [
        output(o.rounds, prompt_id=o.prompt_id, turn=turn, sample=sample)
        for o in few
        for turn in range(2)
        for sample in range(5)
    ]
    once, tenfold = (metrics.summarize(rows, 1)["acceptance_length_ci95"] for rows in (few, copies))
    assert once == tenfold
    assert once == metrics.summarize(few, 1)["acceptance_length_ci95"]  # seeded
    assert once[0] < 1.5 < once[1]


def test_one_prompt_has_no_interval():
    assert metrics.bootstrap_interval([3], [2]) == (None, None)


def test_paired_difference_removes_what_the_prompts_share():
    rng = np.random.default_rng(1)
    rounds = rng.integers(30, 60, size=80).astype(float)
    committed = rounds * rng.uniform(1.2, 3.0, size=80)
    a, b = (committed + 0.05 * rounds, rounds), (committed, rounds)
    difference, low, high = metrics.paired_difference(a, b)
    assert difference == pytest.approx(0.05)
    assert low == pytest.approx(0.05)
    assert high == pytest.approx(0.05)
    unpaired = metrics.bootstrap_interval(*b)
    assert unpaired[1] - unpaired[0] > 0.1
    assert metrics.paired_difference(b, b) == (0.0, 0.0, 0.0)
    assert metrics.paired_difference(([], []), ([], [])) == (None, None, None)


def test_quotient_of_two_rates_has_an_interval_that_covers_it():
    rng = np.random.default_rng(0)
    covered, widths = 0, []
    for seed in range(100):
        seconds = rng.uniform(0.1, 0.3, size=(2, 30))
        tokens = [rng.poisson(rate * own) for rate, own in zip((300, 200), seconds, strict=True)]
        a, b = zip(tokens, seconds, strict=True)
        low, high = metrics.quotient_interval(a, b, seed=seed)
        covered += low <= 1.5 <= high
        widths.append(high - low)
    assert 88 <= covered <= 99
    assert 0.9 < np.mean(widths) / (2 * 1.96 * 1.5 * np.sqrt(1 / 1800 + 1 / 1200)) < 1.1


def test_one_turn_has_no_interval():
    assert metrics.quotient_interval(([5], [1.0]), ([4, 4], [1.0, 1.0])) == (None, None)
    assert metrics.quotient_interval(([5, 5], [1.0, 1.0]), ([], [])) == (None, None)


def test_repeated_ngrams():
    assert metrics.repeated_ngrams(range(7)) == (0, 0)
    assert metrics.repeated_ngrams(range(20)) == (0, 13)
    assert metrics.repeated_ngrams([1, 2] * 8) == (7, 9)  # two distinct 8-grams among nine


def test_loops_are_set_apart():
    outputs = [
        output([(1, 0, 1)] * 15, "plain", token_ids=tuple(range(16))),
        output([(1, 1, 2)] * 8, "loop", token_ids=(1, 2) * 8 + (3,)),
    ]
    summary = metrics.summarize(outputs, 1)
    assert summary["repeated_8gram_share"] == pytest.approx(7 / 19)
    assert summary["repeated_8gram_share_ci95"] == pytest.approx([0, 7 / 10])  # of two prompts
    assert summary["num_prompts_low_repeat"] == 1
    assert summary["acceptance_length_low_repeat"] == 1.0
    assert summary["acceptance_length"] == pytest.approx(31 / 23)


def test_hash_is_of_the_compact_json_list():
    ids = [(1, 22, 333), (4,)]
    assert metrics.output_sha256(ids) == hashlib.sha256(b"[[1,22,333],[4]]").hexdigest()
    assert metrics.output_sha256(np.array([[1, 2]])) == hashlib.sha256(b"[[1,2]]").hexdigest()
    assert metrics.ids_sha256((1, 22)) == hashlib.sha256(b"[1,22]").hexdigest()


def test_per_prompt_rows_have_the_schema():
    columns = metrics.per_prompt_columns(3)
    assert columns == [
        *("prompt_id", "turn", "category", "sample", "text_sha256", "num_tokens", "rounds"),
        *("expected_rounds", "var_rounds", "accepted_1", "accepted_2", "accepted_3"),
        *("drafted_1", "drafted_2", "drafted_3", "seconds"),
    ]
    (row,) = metrics.per_prompt_rows([output(M1, turn=1, sample=2)], 3)
    assert set(row) == set(columns)
    assert [row[f"accepted_{j}"] for j in (1, 2, 3)] == [3, 1, 1]
    assert [row[f"drafted_{j}"] for j in (1, 2, 3)] == [4, 3, 3]
    assert (row["turn"], row["sample"], row["rounds"], row["num_tokens"]) == (1, 2, 4, 10)
    assert row["expected_rounds"] == row["var_rounds"] == ""
    assert metrics.per_prompt_columns(0)[-2:] == ["var_rounds", "seconds"]
