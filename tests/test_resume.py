"""A run goes on by `resume=RUN` alone, and never under settings that its state does not go with."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import call, rows_of, status_of, summary_of
from tiny_chat import write_chat_model

from specdec.errors import ConfigError
from specdec.experiments.resuming import with_overrides_of_run
from specdec.experiments.training import CsvLog
from specdec.training import loop
from specdec.training.checkpoint import check_state
from specdec.training.data import response, write_dataset


def write_texts(path, seed=0):
    rng = np.random.default_rng(seed)
    texts = [response(ids[:3], ids[3:], 0.0) for ids in rng.integers(3, 101, (10, 12)).tolist()]
    write_dataset(path, texts, vocab_size=101, meta={})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Overrides of a run of ten steps: two epochs of five rows."""
    folder = tmp_path_factory.mktemp("inputs")
    write_texts(folder / "data")
    return [
        f"target.path={write_chat_model(folder / 'model')}",
        f"train_data.paths=[{folder / 'data'}]",
        *("train_data.row_tokens=24", "dtype=float32", "device=cpu", "logger=none"),
        *("log_every=1", "eval_every=0", "budget.max_tokens=null", "unroll.num_steps=3"),
        *("budget.epochs=2", "optimizer=muon", "optimizer.lr=0.003", "seed=5"),
        *("data.num_prompts=2", "sampling.max_tokens=4"),
    ]


@pytest.fixture(scope="module")
def started(train_mtp, base, tmp_path_factory):
    """A run that was left after step 6 of 10, and the same one uninterrupted."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        whole = [*base, f"hydra.run.dir={folder / 'whole'}"]
        assert call(train_mtp.main, whole, patch) == 0
        part = [*base, "budget.stop_after_steps=6", f"hydra.run.dir={folder / 'part'}"]
        assert call(train_mtp.main, part, patch) == 0
    return folder / "part", folder / "whole"


@pytest.fixture
def part(started, tmp_path):
    """A copy of the run that was left."""
    return Path(shutil.copytree(started[0], tmp_path / "part"))


def state_of(folder):
    return torch.load(folder / "state.pt", weights_only=True)


def same_weights(a, b):
    a, b = state_of(a), state_of(b)
    assert a["progress"]["step"] == b["progress"]["step"]
    for kind in ("params", "average"):
        assert all(torch.equal(a[kind][name], b[kind][name]) for name in b[kind])


def timeless(path):
    clocks = ("seconds", "tokens_per_second")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows_of(path)]


@pytest.mark.parametrize("in_place", [False, True])
def test_the_folder_is_all_that_resuming_needs(
    train_mtp, started, part, in_place, tmp_path, monkeypatch, capfd
):
    folder = part if in_place else tmp_path / "second"
    argv = [f"resume={part}", f"hydra.run.dir={folder}"]
    assert call(train_mtp.main, argv, monkeypatch) == 0
    whole = started[1]
    same_weights(folder, whole)
    assert timeless(folder / "train.csv") == timeless(whole / "train.csv")
    assert (folder / "train_mtp.log").exists()
    summary = summary_of(folder)
    assert summary["finished"]
    assert summary["steps_in_this_session"] == 4
    told = {k: v for k, v in summary["config"].items() if k != "resume"}
    assert told == {k: v for k, v in summary_of(whole)["config"].items() if k != "resume"}
    # a finished run has nothing left to do; a third session needs no more than a larger budget
    assert "the budget was spent" not in capfd.readouterr().out
    again = [f"resume={folder}", f"hydra.run.dir={tmp_path / 'again'}"]
    assert call(train_mtp.main, again, monkeypatch) == 0
    assert "the budget was spent after 10 steps" in capfd.readouterr().out
    same_weights(tmp_path / "again", whole)
    third = [f"resume={folder}", "budget.epochs=3", f"hydra.run.dir={tmp_path / 'third'}"]
    assert call(train_mtp.main, third, monkeypatch) == 0
    assert summary_of(tmp_path / "third")["steps"] == 15


def test_a_killed_run_goes_on_from_its_last_state(train_mtp, base, started, tmp_path, monkeypatch):
    folder = tmp_path / "killed"
    with monkeypatch.context() as patch:

        def dies(average, params, step, decay):
            if step == 8:
                raise KeyboardInterrupt
            update(average, params, step, decay)

        update = loop.update_average_
        patch.setattr(loop, "update_average_", dies)
        argv = [*base, "save_every=3", f"hydra.run.dir={folder}"]
        assert call(train_mtp.main, argv, patch) == 130
    assert state_of(folder)["progress"]["step"] == 6
    assert status_of(folder)["status"] == "interrupted"
    argv = [f"resume={folder}", f"hydra.run.dir={folder}"]
    assert call(train_mtp.main, argv, monkeypatch) == 0
    same_weights(folder, started[1])
    assert timeless(folder / "train.csv") == timeless(started[1] / "train.csv")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer=adamw", "optimizer.adamw was specdec.training.optimizer.muon"),
        ("dtype=bfloat16", "dtype=bfloat16 was float32 before, and"),
        ("draft.family=llama_eagle3", "draft.family=llama_eagle3 was null"),
    ],
)
def test_what_the_state_does_not_go_with_is_refused(
    train_mtp, part, override, said, monkeypatch, capfd
):
    """In the run's own folder, which stays as it was."""
    before = {p: p.read_bytes() for p in part.rglob("*") if p.is_file()}
    argv = [f"resume={part}", override, f"hydra.run.dir={part}"]
    assert call(train_mtp.main, argv, monkeypatch) == 1
    err = capfd.readouterr().err
    assert said in err
    assert "start a new run without resume" in err
    assert err.count("\n") == 1
    assert {p: p.read_bytes() for p in part.rglob("*") if p.is_file()} == before


BOUND = {
    "optimizer.lr": 0.5, "optimizer.matrix_lr": 0.5, "lr_schedule.warmup": 0.5, "seed": 6,
    "unroll.num_steps": 2, "unroll.decay": 0.5, "objective.kl": 0.5, "accumulation": 2,
    "train_data.row_tokens": 48, "train_data.num_tokens": 9, "average_decay": 0.5,
    "head.num_rows": 9, "target.quantize": "int8", "clip_norm": 2.0, "own.keyword": 1,
}  # fmt: skip
OPEN = {
    "budget.max_tokens": 9, "budget.epochs": 7, "log_every": 3, "save_every": 1, "eval_every": 2,
    "logger.mode": "offline", "device": "cuda", "num_threads": 2, "kernels.graphs": True,
    "unroll.num_chunks": 2, "data.num_prompts": 3, "propose.num_draft_tokens": 1, "new": None,
}  # fmt: skip


def changed_config(run, key, value):
    """A run's configuration with another value, and the old one."""
    config = summary_of(run)["config"]
    node, _, name = key.rpartition(".")
    place = config.setdefault(node, {}) if node else config
    old, place[name] = place.get(name), value
    return config, "null" if old is None else str(old)


@pytest.mark.parametrize("key", BOUND)
def test_a_setting_that_the_state_is_bound_to(train_mtp, started, key):
    config, old = changed_config(started[0], key, BOUND[key])
    with pytest.raises(ConfigError, match=re.escape(f": {key}={BOUND[key]} was {old} before")):
        check_state(started[0], config, free=(*train_mtp.FREE, *train_mtp.JUDGED))


@pytest.mark.parametrize("key", OPEN)
def test_a_setting_that_may_change(train_mtp, started, key):
    config, _ = changed_config(started[0], key, OPEN[key])
    check_state(started[0], config, free=(*train_mtp.FREE, *train_mtp.JUDGED))


def test_without_the_record_of_the_overrides_the_state_still_tells(
    train_mtp, base, started, part, monkeypatch, capfd
):
    shutil.rmtree(part / ".hydra")
    folder = part.parent / "second"
    argv = [*base, f"resume={part}", f"hydra.run.dir={folder}"]
    assert call(train_mtp.main, [*argv, "optimizer.lr=0.01"], monkeypatch) == 1
    assert "optimizer.lr=0.01 was 0.003" in capfd.readouterr().err
    assert not folder.exists()
    assert call(train_mtp.main, argv, monkeypatch) == 0
    same_weights(folder, started[1])


def test_data_is_known_by_its_content(train_mtp, base, started, part, tmp_path, monkeypatch, capfd):
    """It may have moved; other texts in its place are refused."""
    data = Path(base[1].removeprefix("train_data.paths=[").removesuffix("]"))
    shutil.copytree(data, tmp_path / "moved")
    write_texts(tmp_path / "other", seed=1)
    argv = [f"resume={part}", f"hydra.run.dir={tmp_path / 'second'}"]
    other = f"train_data.paths=[{tmp_path / 'other'}]"
    assert call(train_mtp.main, [*argv, other], monkeypatch) == 1
    assert "train_data.paths=" in capfd.readouterr().err
    shutil.move(data, tmp_path / "kept")
    try:
        shutil.copytree(tmp_path / "other", data)
        assert call(train_mtp.main, argv, monkeypatch) == 1
        assert f"what train_data.paths=['{data}'] names has changed" in capfd.readouterr().err
    finally:
        shutil.rmtree(data)
        shutil.move(tmp_path / "kept", data)
    moved = f"train_data.paths=[{tmp_path / 'moved'}]"
    assert call(train_mtp.main, [*argv, moved], monkeypatch) == 0
    same_weights(tmp_path / "second", started[1])


def test_no_state_is_told_before_anything_is_composed(train_mtp, tmp_path, monkeypatch, capfd):
    argv = [f"resume={tmp_path / 'nothing'}", f"hydra.run.dir={tmp_path / 'run'}"]
    assert call(train_mtp.main, argv, monkeypatch) == 1
    assert capfd.readouterr().err == (
        f"error: resume={tmp_path / 'nothing'} has no state.pt; give the folder of a run that "
        "ended or that saved its state on the way (save_every=STEPS)\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_damaged_state_is_told(train_mtp, part, monkeypatch, capfd):
    whole = (part / "state.pt").read_bytes()
    (part / "state.pt").write_bytes(whole[: len(whole) // 2])
    assert call(train_mtp.main, [f"resume={part}"], monkeypatch) == 1
    assert f"resume={part}: its state.pt is damaged" in capfd.readouterr().err
    torch.save(torch.zeros(2), part / "state.pt")
    with pytest.raises(ConfigError, match="is of an earlier version"):
        check_state(part, {}, free=())
    (part / "state.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="is damaged"):
        check_state(part, {}, free=())


@pytest.mark.parametrize(
    "content", [b"- [a\n  b: :", b"\xff\xfe\x00", b"- 1\n- null\n", b"a: 1\n", b"3"]
)
def test_a_damaged_record_of_the_overrides_is_told(content, tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "state.pt").touch()
    (tmp_path / ".hydra" / "overrides.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"overrides.yaml (cannot be read|is not a list)"):
        with_overrides_of_run([f"resume={tmp_path}"])


def test_a_log_whose_last_row_was_cut_off(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("step,loss\n1,0.5\n2,0.4\n3,0.3\n1")
    CsvLog(path, keep_until=2).add({"step": 3, "loss": 0.2})
    assert path.read_text().split() == ["step,loss", "1,0.5", "2,0.4", "3,0.2"]
    path.write_text("my notes\nmine\n")
    with pytest.raises(ConfigError, match=r"train.csv is no log of steps; move it away"):
        CsvLog(path, keep_until=2)
    assert path.read_text() == "my notes\nmine\n"


@pytest.mark.parametrize("changed", [False, True])
def test_the_best_so_far_is_of_one_development_set(
    train_mtp, part, changed, tmp_path, monkeypatch, capfd
):
    """A best that was reached under other settings is no measure for what comes."""
    state = state_of(part)
    state["progress"] |= {"best": 99.0, "best_step": 4, "evaluated_step": 4}
    state["progress"]["dev"] = {"acceptance_length": 99.0, "acceptance_length_low": 98.0}
    torch.save(state, part / "state.pt")
    (part / "head").mkdir()
    (part / "head" / "old").touch()
    (part / "eval.csv").write_text("step,tokens,acceptance_length\n4,9,99.0\n")
    folder = tmp_path / "second"
    argv = [f"resume={part}", "eval_every=2", f"hydra.run.dir={folder}"]
    if changed:
        argv.append("propose.num_draft_tokens=2")
    assert call(train_mtp.main, argv, monkeypatch) == 0
    out = capfd.readouterr().out
    summary = summary_of(folder)
    line = (
        "propose.num_draft_tokens=2 was 5 before: heads were judged otherwise, the best is chosen"
    )
    assert (line in out) is changed
    assert (folder / "head" / "config.json").exists() is changed
    assert (folder / "head" / "old").exists()
    steps = [row["step"] for row in rows_of(folder / "eval.csv")]
    if changed:
        assert 1 <= summary["acceptance_length"] <= 3
        assert summary["best_step"] in (8, 10)
        assert steps == ["8", "10"]
        assert rows_of(folder / "eval_until_6.csv")[0]["acceptance_length"] == "99.0"
    else:
        assert summary["acceptance_length"] == 99.0
        assert summary["acceptance_length_ci95"] == [98.0, None]
        assert steps == ["4", "8", "10"]


def test_overrides_beside_win(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "state.pt").touch()
    old = [
        "+experiment=a",
        "k=1",
        "budget.stop_after_steps=3",
        "+verify.x=2",
        "resume=r",
        "s='a b'",
    ]
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(old))
    run = f"resume={tmp_path}"
    assert with_overrides_of_run([run]) == ["+experiment=a", "k=1", "+verify.x=2", "s='a b'", run]
    given = ["-m", run, "experiment=b", "verify.x=3", "hydra.sweep.dir=d"]
    assert with_overrides_of_run(given) == [
        *("-m", "k=1", "s='a b'"),
        *(run, "+experiment=b", "+verify.x=3", "hydra.sweep.dir=d"),
    ]
    for plain in (["--help"], ["k=2"], ["resume=null"], ["-m", "resume=a,b"], ["k=[broken", "-x"]):
        assert with_overrides_of_run(plain) == plain
