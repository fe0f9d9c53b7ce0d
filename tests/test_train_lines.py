"""What a training run says and leaves on its way: early, after a kill, with nothing left to do."""

import pytest
import torch
from scripts import call, rows_of, status_of
from tiny_chat import write_chat_model
from token_data import random_samples

from specdec.training import checkpoint
from specdec.training.data import write_dataset


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Overrides of a run of eight steps that reports every ten."""
    folder = tmp_path_factory.mktemp("inputs")
    write_dataset(folder / "data", random_samples([12] * 16), vocab_size=101, meta={})
    return [
        f"target.path={write_chat_model(folder / 'model')}",
        f"train_data.paths=[{folder / 'data'}]",
        *("train_data.row_tokens=24", "dtype=float32", "device=cpu", "logger=none"),
        *("budget.max_tokens=null", "budget.epochs=1", "unroll.num_steps=2", "eval_every=0"),
    ]


def steps_told(text):
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("step ")]


def test_the_first_step_is_told(train_mtp, base, tmp_path, monkeypatch, capfd):
    """Of each session; the others at their multiples, and the last."""
    run, second = tmp_path / "run", tmp_path / "second"
    some = [*base, "log_every=3", "budget.stop_after_steps=4", f"hydra.run.dir={run}"]
    assert call(train_mtp.main, some, monkeypatch) == 0
    assert steps_told(capfd.readouterr().out) == [1, 3, 4]
    assert call(train_mtp.main, [f"resume={run}", f"hydra.run.dir={second}"], monkeypatch) == 0
    assert steps_told(capfd.readouterr().out) == [5, 6, 8]
    rows = rows_of(second / "train.csv")
    assert [row["step"] for row in rows] == ["1", "3", "4", "5", "6", "8"]
    assert all(float(row["tokens_per_second"]) > 0 < float(row["loss"]) for row in rows)


def test_a_killed_run_leaves_the_rows_that_it_logged(train_mtp, base, tmp_path, monkeypatch, capfd):
    """Eight steps at log_every=10, killed as soon as the state of step 4 is written."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:

        def then_dies(folder, progress, *others):
            write(folder, progress, *others)
            if progress.step == 4:
                raise KeyboardInterrupt

        write = checkpoint.save_state
        patch.setattr(checkpoint, "save_state", then_dies)
        argv = [*base, "save_every=2", f"hydra.run.dir={run}"]
        assert call(train_mtp.main, argv, patch) == 130
    assert status_of(run)["status"] == "interrupted"
    assert torch.load(run / "state.pt", weights_only=True)["progress"]["step"] == 4
    assert [row["step"] for row in rows_of(run / "train.csv")] == ["1"]
    assert steps_told(capfd.readouterr().out) == [1]
    assert call(train_mtp.main, [f"resume={run}", f"hydra.run.dir={run}"], monkeypatch) == 0
    assert [row["step"] for row in rows_of(run / "train.csv")] == ["1", "5", "8"]


def test_a_finished_run_that_is_resumed_says_what_becomes_of_it(
    train_mtp, base, tmp_path, monkeypatch, capfd
):
    """Its folder is whole, as after any session; no step is taken, and a line says where it is."""
    run, second = tmp_path / "run", tmp_path / "second"
    assert call(train_mtp.main, [*base, f"hydra.run.dir={run}"], monkeypatch) == 0
    assert "no step is left" not in capfd.readouterr().out
    for folder, said in ((second, f"{second} gets a copy of the run"), (run, "written again")):
        argv = [f"resume={run}", f"hydra.run.dir={folder}"]
        assert call(train_mtp.main, argv, monkeypatch) == 0
        out = capfd.readouterr().out
        (line,) = [line for line in out.splitlines() if line.startswith("no step is left")]
        assert said in line
        assert steps_told(out) == []
        kept = [row["step"] for row in rows_of(folder / "train.csv")]
        assert kept == ["1", "8"]
        assert (folder / "last" / "model.safetensors").is_file()
