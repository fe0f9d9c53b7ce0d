"""Token data sets, packed rows, the order of an epoch, draft vocabularies ranked on the data."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_target
from token_data import VOCAB, dataset, random_samples

from specdec.errors import DataError
from specdec.experiments.training import draft_rows
from specdec.training.data import (
    Sample,
    load_dataset,
    rank_ids,
    repeated_ngram_share,
    response,
    write_dataset,
)
from specdec.training.packing import Cursor, epoch_rows, make_row, windows


def test_dataset_round_trip(tmp_path):
    samples = random_samples([7, 5, 9])
    meta = write_dataset(tmp_path / "d", samples, vocab_size=VOCAB, meta={"note": "x"})
    assert meta["num_tokens"] == 21
    assert meta["num_supervised"] == 12
    assert json.loads((tmp_path / "d" / "meta.json").read_text()) == meta
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]
    data = load_dataset(tmp_path / "d")
    assert data.tokens[0].dtype == np.uint16
    row = make_row(data, np.array([2, 0]), 20)
    assert row.input_ids.tolist() == [*samples[2].token_ids, *samples[0].token_ids, 0, 0, 0, 0]
    assert row.positions.tolist() == [*range(9), *range(7), *range(4)]
    assert row.cu_seqlens.tolist() == [0, 9, 16, 20]
    assert row.labels.tolist() == [3, 4, 5, 6, 7, 8, 12, 13, 14, 15]
    assert (row.max_len, row.num_tokens, row.samples) == (9, 16, (2, 0))
    row = make_row(data, np.array([1]), 13)  # unused columns are no longer document than the rest
    assert row.cu_seqlens.tolist() == [0, 5, 10, 13]
    assert row.positions.tolist() == [*range(5), *range(5), *range(3)]
    assert (row.max_len, row.num_tokens) == (5, 5)


def test_two_data_sets_read_as_one_and_a_prefix_holds_enough_labels(tmp_path):
    write_dataset(tmp_path / "a", random_samples([7, 5]), vocab_size=VOCAB, meta={})
    write_dataset(tmp_path / "b", random_samples([9], seed=1), vocab_size=VOCAB, meta={})
    paths = [tmp_path / "a", tmp_path / "b"]
    both = load_dataset(paths)
    assert both.lengths.tolist() == [7, 5, 9]
    assert make_row(both, np.array([2]), 9).input_ids.tolist() == list(
        random_samples([9], seed=1)[0].token_ids
    )
    assert len(load_dataset(paths, num_tokens=5)) == 2
    with pytest.raises(DataError, match=r"num_tokens=13.*hold 12"):
        load_dataset(paths, num_tokens=13)


def test_bad_data_sets_are_refused_with_one_line(tmp_path):
    sample = Sample([1, 2, 3, 4], [False] * 4, 0.0)
    write_dataset(tmp_path / "masked", [sample], vocab_size=VOCAB, meta={})
    with pytest.raises(DataError, match="no supervised token"):
        load_dataset(tmp_path / "masked")
    with pytest.raises(DataError, match="exists already"):
        write_dataset(tmp_path / "masked", [sample], vocab_size=VOCAB, meta={})
    with pytest.raises(DataError, match=r"not a data set.*tokens\.npy"):
        load_dataset(tmp_path / "absent")
    with pytest.raises(DataError, match="no sample"):
        write_dataset(tmp_path / "empty", [], vocab_size=VOCAB, meta={})
    with pytest.raises(DataError, match="vocabulary sizes"):
        load_dataset(tmp_path / "masked", vocab_size=VOCAB + 1)
    with pytest.raises(DataError, match=r"9 tokens exceeds train_data\.row_tokens=8"):
        epoch_rows(dataset(tmp_path, [9, 4]), row_tokens=8, seed=0, epoch=0)


@pytest.mark.parametrize("name", ["tokens.npy", "meta.json"])
def test_a_damaged_data_set_is_named(tmp_path, name):
    write_dataset(tmp_path / "d", [response([1], [2, 3], 0.0)], vocab_size=9, meta={})
    (tmp_path / "d" / name).write_text("{")
    with pytest.raises(DataError, match=r"d holds a damaged data set"):
        load_dataset(tmp_path / "d")


def test_repeated_ngram_share():
    assert repeated_ngram_share(list(range(20))) == 0
    assert repeated_ngram_share([1, 2] * 20) == pytest.approx(1 - 2 / 33)
    assert repeated_ngram_share([5] * 7) == 0
    text = np.random.default_rng(0).integers(0, 3, 400).tolist()
    grams = [tuple(text[i : i + 8]) for i in range(len(text) - 7)]
    assert repeated_ngram_share(text) == pytest.approx(1 - len(set(grams)) / len(grams))


def test_an_epoch_holds_every_sample_once_in_an_order_of_its_own(tmp_path):
    data = dataset(tmp_path, [4 + i % 7 for i in range(50)])
    orders = []
    for epoch in range(2):
        rows = epoch_rows(data, row_tokens=24, seed=3, epoch=epoch)
        orders.append(np.concatenate(rows))
        assert sorted(orders[-1]) == list(range(50))
        assert all(data.lengths[row].sum() <= 24 for row in rows)
    assert (orders[0] != orders[1]).any()
    again = epoch_rows(data, row_tokens=24, seed=3, epoch=1)
    assert (np.concatenate(again) == orders[1]).all()


def test_windows_resume_where_they_stopped_and_keep_the_short_one(tmp_path):
    data = dataset(tmp_path, [10] * 10)
    keywords = {"row_tokens": 10, "accumulation": 4, "seed": 0, "epochs": 2}
    whole = list(windows(data, start=Cursor(0, 0), **keywords))
    assert [len(rows) for _, rows in whole] == [4, 4, 2, 4, 4, 2]
    for done in range(len(whole)):
        cursor = whole[done][0]
        rest = list(windows(data, start=cursor, **keywords))
        expected = [[row.samples for row in rows] for _, rows in whole[done + 1 :]]
        assert [[row.samples for row in rows] for _, rows in rest] == expected


def test_ranked_ids_pad_with_unused_ones(tmp_path):
    """CASES T3: any size works, also one past the number of ids in the data."""
    text = [9, 9, 50, 20, 20, 20, 30, 40, 40]
    write_dataset(tmp_path / "d", [response([7, 7], text, 0.0)], vocab_size=101, meta={})
    ranking = rank_ids(load_dataset(tmp_path / "d"))
    assert ranking[:5].tolist() == [20, 9, 40, 30, 50]  # prompts do not count
    assert sorted(ranking.tolist()) == list(range(101))
    target = tiny_target()
    for size in (16, 8, 3):
        cfg = SimpleNamespace(logits_from="target_rows", num_draft_rows=size)
        lm_head, d2t, t2d = draft_rows(cfg, SimpleNamespace(num_rows=None), target, ranking)
        assert len(d2t) == size
        assert d2t.tolist() == sorted(set(d2t.tolist()))
        assert {9, 20, 40} <= set(d2t.tolist())
        assert int((t2d >= 0).sum()) == size
        assert torch.equal(lm_head, target.lm_head[d2t])
    cfg = SimpleNamespace(logits_from="shared", num_draft_rows=None)
    assert draft_rows(cfg, SimpleNamespace(num_rows=None), target, ranking)[1:] == (None, None)
    for size in (None, 0, 102):
        cfg = SimpleNamespace(logits_from="target_rows", num_draft_rows=size)
        with pytest.raises(ValueError, match="num_draft_rows"):
            draft_rows(cfg, SimpleNamespace(num_rows=None), target, ranking)
