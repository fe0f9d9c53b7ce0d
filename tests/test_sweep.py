"""Sweeps: killed and run again, extended; jobs alone, together and side by side."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import MissingConfigException
from scripts import call, jobs_of, rows_of, status_of, summary_of, tiny_job

import specdec.experiments
from specdec import build
from specdec.checks import one_line
from specdec.config import register_schemas
from specdec.experiments import acceptance, plots, sweep, tables
from specdec.experiments.launching import job_folder

SCRIPT = Path(specdec.experiments.__file__).with_name("acceptance.py")
TYPO = "+hydra.job.typo=1"
RULES = """
import os, time, weakref
from pathlib import Path
import torch
from specdec.state import Drafts
from specdec.verify.rejection import rejection

BIG = []

class Big:
    pass

def stopping(dist, drafts, keys):
    flag = Path(os.environ["STOP_FLAG"])
    if drafts.token_ids.shape[1] == 3 and flag.exists():
        flag.with_suffix(".reached").touch()
        time.sleep(600)
    return rejection(dist, drafts, keys)

def holding(dist, drafts, keys, *, fails):
    if fails:
        big = Big()
        BIG.append(weakref.ref(big))
        raise RuntimeError("a bug of my own")
    assert BIG[0]() is None, "the failed job's frames are still there"
    return rejection(dist, drafts, keys)

def guessing(state, batch, committed, out, draft, *, num_draft_tokens):
    rows = len(batch.request_slots)
    ids = torch.randint(3, 60, (rows, num_draft_tokens))
    return Drafts(ids, torch.ones_like(ids, dtype=torch.bool), torch.full((rows,), ids.shape[1]))
"""


@pytest.mark.parametrize("key", ["run", "sweep"])
@pytest.mark.parametrize("script", ["config", "speed"])
def test_commands_of_one_second_have_folders_of_their_own(script, key):
    register_schemas()
    with initialize_config_module("specdec.conf", version_base="1.3"):
        configs = [compose(script, return_hydra_config=True) for _ in range(3)]
    assert len({config.hydra[key].dir for config in configs}) == 3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return [*tiny_job(tmp_path_factory.mktemp("sweeps")), "logger=none"]


@pytest.fixture
def rules(tmp_path, monkeypatch):
    """A user's module of rules on the path, `own_rules`; its folder."""
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "own_rules.py").write_text(RULES)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("own_rules", None)


def test_a_killed_sweep_goes_on_where_it_was(base, rules, tmp_path, monkeypatch, capfd):
    folder, flag = tmp_path / "grid", tmp_path / "stop"
    flag.touch()
    monkeypatch.setenv("STOP_FLAG", str(flag))
    argv = ["-m", *base, "propose.num_draft_tokens=1,2,3,4,5", f"hydra.sweep.dir={folder}"]
    argv += ["verify._target_=own_rules.stopping"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *argv],
        env={**os.environ, "PYTHONPATH": str(rules)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        waited = time.monotonic()
        while not flag.with_suffix(".reached").exists():
            assert process.poll() is None, "the sweep ended before its third job"
            assert time.monotonic() - waited < 90
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    flag.unlink()
    assert [row["status"] for row in sweep.read_jobs(folder)] == ["done", "done", "killed"]
    assert [row["status"] for row in rows_of(folder / "sweep.csv")] == ["done", "done"]
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*/summary.json")}
    assert len(before) == 2

    assert call(acceptance.main, argv, monkeypatch) == 0
    assert capfd.readouterr().out.count("is done already: skipped") == 2
    table = rows_of(folder / "sweep.csv")
    assert [row["status"] for row in table] == ["done"] * 5
    assert [row["propose.num_draft_tokens"] for row in table] == list("12345")
    assert [summary_of(job)["num_draft_tokens"] for job in jobs_of(folder)] == [1, 2, 3, 4, 5]
    assert {p for p in folder.iterdir() if p.is_dir()} == set(jobs_of(folder))
    after = {p: p.stat().st_mtime_ns for p in folder.glob("*/summary.json")}
    assert len(after) == 5
    assert before.items() <= after.items()
    assert len({row["output_sha256"] for row in table}) == 1


def test_a_command_of_which_nothing_ran_prints_no_table(base, tmp_path, monkeypatch, capfd):
    argv = ["-m", *base, "data.num_prompts=1", f"hydra.sweep.dir={tmp_path}"]
    assert call(acceptance.main, [*argv, "propose.num_draft_tokens=1"], monkeypatch) == 0
    assert "table: " in capfd.readouterr().out
    (job,) = jobs_of(tmp_path)
    before = [(job / name).read_bytes() for name in ("status.json", "summary.json")]
    for refused in (["propose.num_draft_tokens=abc,1"], ["propose.num_draft_tokens=1", TYPO]):
        assert call(acceptance.main, [*argv, *refused], monkeypatch) == 1
        out, err = capfd.readouterr()
        assert err.count("\n") == 1
        assert out.count("\n") == out.count("[HYDRA]")
        assert [(job / name).read_bytes() for name in ("status.json", "summary.json")] == before
    assert call(acceptance.main, [*argv, "propose.num_draft_tokens=1"], monkeypatch) == 0
    assert "table: " in capfd.readouterr().out  # though all of it was skipped


def test_a_longer_sweep_runs_only_what_is_new(base, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    argv = ["-m", *base, "logger=wandb", f"hydra.sweep.dir={tmp_path}", "data.num_prompts=2"]
    # -1 cannot run
    assert call(acceptance.main, [*argv, "propose.num_draft_tokens=2,3,-1"], monkeypatch) == 1
    capfd.readouterr()
    kept, changed, _ = jobs_of(tmp_path)
    assert status_of(kept)["value"] == summary_of(kept)["acceptance_length"]
    status = status_of(changed)
    (changed / "status.json").write_text(json.dumps({**status, "config_hash": "another"}))
    # a value that is the default's names the same configuration
    longer = ["propose.num_draft_tokens=1,2,3,-1", "sampling.temperature=0"]
    assert call(acceptance.main, [*argv, *longer], monkeypatch) == 1
    out, err = capfd.readouterr()
    assert out.count("skipped") == 1
    assert out.count("done with another configuration: run again") == 1
    assert len(err.splitlines()) == 1  # what failed is tried again
    table = rows_of(tmp_path / "sweep.csv")
    told = [(row["propose.num_draft_tokens"], row["status"]) for row in table]
    assert told == [("1", "done"), ("2", "done"), ("3", "done"), ("-1", "failed")]
    assert status_of(changed)["config_hash"] == status["config_hash"]
    assert not list(tmp_path.glob("*/wandb/*run-*"))


def test_jobs_together_give_the_rows_of_each_alone(base, rules, tmp_path, monkeypatch):
    argv = [*base, "propose._target_=own_rules.guessing", "data.turns=all"]
    argv += ["sampling.temperature=0.8"]
    build._target.cache_clear()
    swept = ["-m", *argv, "propose.num_draft_tokens=3,1", f"hydra.sweep.dir={tmp_path}/grid"]
    assert call(acceptance.main, swept, monkeypatch) == 0
    assert build._target.cache_info().misses == 1  # one load for all of them
    for index, job in enumerate(jobs_of(tmp_path / "grid")):
        build._target.cache_clear()
        torch.manual_seed(1000 + index)
        alone = tmp_path / f"alone{index}"
        own = [f"propose.num_draft_tokens={(3, 1)[index]}", f"hydra.run.dir={alone}"]
        assert call(acceptance.main, [*argv, *own], monkeypatch) == 0
        assert timeless(alone) == timeless(job)
        assert (alone / "outputs.jsonl").read_text() == (job / "outputs.jsonl").read_text()


def timeless(folder):
    """Rows of per_prompt.csv but for what a clock says."""
    rows = rows_of(folder / "per_prompt.csv")
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_a_failed_job_holds_no_memory(base, rules, tmp_path, monkeypatch, capfd):
    argv = ["-m", *base, f"hydra.sweep.dir={tmp_path}/grid", "data.num_prompts=2"]
    argv += ["verify._target_=own_rules.holding", "+verify.fails=true,false"]
    assert call(acceptance.main, argv, monkeypatch) == 1
    table = rows_of(tmp_path / "grid" / "sweep.csv")
    assert [row["status"] for row in table] == ["failed", "done"]
    assert "a bug of my own" in capfd.readouterr().err


@pytest.mark.slow
def test_jobs_side_by_side_give_the_same_table(base, tmp_path, monkeypatch, capfd):
    axes = [*base, "propose.num_draft_tokens=1,-1,3"]
    for name, more in (("one", []), ("two", ["launcher=joblib", "hydra.launcher.n_jobs=2"])):
        argv = ["-m", *axes, *more, f"hydra.sweep.dir={tmp_path}/{name}"]
        assert call(acceptance.main, argv, monkeypatch) == 1
        assert "sweep.csv" in capfd.readouterr().out
    one, two = (rows_of(tmp_path / name / "sweep.csv") for name in ("one", "two"))
    for row in (*one, *two):
        for key in ("seconds", "tokens_per_second", "launcher", "hydra.launcher.n_jobs"):
            row.pop(key, None)
    assert one == two
    for a, b in zip(jobs_of(tmp_path / "one"), jobs_of(tmp_path / "two"), strict=True):
        if (a / "per_prompt.csv").exists():
            assert timeless(a) == timeless(b)
    assert "Traceback" in (jobs_of(tmp_path / "two")[1] / "acceptance.log").read_text()


def test_a_composing_error_stops_a_sweep_before_its_first_job(base, tmp_path, monkeypatch, capfd):
    argv = ["-m", *base, "verify=rejection,rejecton", f"hydra.sweep.dir={tmp_path}/grid"]
    assert call(acceptance.main, argv, monkeypatch) == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert "did you mean 'rejection'" in err
    assert not list(tmp_path.glob("grid/*/status.json"))


def test_a_launcher_that_is_not_installed_says_how_to_get_it():
    error = MissingConfigException("no", "hydra/launcher/joblib", ["basic"])
    assert "pip install 'specdec[sweep]'" in one_line(error)


def test_folders_are_named_by_what_is_swept(tmp_path):
    from omegaconf import OmegaConf

    root = OmegaConf.create({"a": {"k": 4}, "path": "x", "hydra": {"job": 1}})
    name = job_folder(str(tmp_path), ["a.k=4", "path=x"], ["path"], root)
    assert name.startswith("k-4_")
    assert job_folder(str(tmp_path), ["path=x"], ["path"], root).startswith("job_")
    odd = job_folder(str(tmp_path), ["+a.k=[1, 2]/..", "b='x y'"], [], root)
    assert odd.startswith("k-1-2_b-x-y_")
    assert "/" not in odd
    root.hydra.job = 2
    (tmp_path / name).mkdir()
    # the folder of the same configuration is kept when more is swept
    assert job_folder(str(tmp_path), ["a.k=4", "path=x"], [], root) == name
    root.a.k = 5
    assert job_folder(str(tmp_path), ["a.k=4", "path=x"], [], root) != name


def test_a_status_that_cannot_be_read_does_not_spoil_the_table(tmp_path):
    status = {"status": "done", "job": "b", "num": 0, "overrides": ["k=1"], "config_hash": "x"}
    status |= {"error": None, "process": "", "started": "", "seconds": 1.0}
    for name, text in (("a", "[]"), ("b", json.dumps(status)), ("c", '{"status": "do')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text(text)
    assert [row["job"] for row in sweep.rebuild(tmp_path)] == ["b"]
    assert rows_of(tmp_path / "sweep.csv")[0]["k"] == "1"


@pytest.mark.parametrize("width", [100, 120])
def test_the_tables_titles_stay_whole(width, monkeypatch, capfd):
    """The columns of long values and of titles of several words give way."""
    swept = {"propose.num_draft_tokens": "4", "sampling.temperature": "0.7"}
    swept |= {"target.path": "m" * 90, "sampling.top_p": "0.9"}
    numbers = {"acceptance_length": 2.5, "acceptance_rate": 0.5, "tokens_per_second": 1234.5}
    other = dict.fromkeys(swept, "0.12")
    rows = [{"job": "a", "status": "done", **keys, **numbers} for keys in (swept, other)]
    monkeypatch.setattr(tables, "PLAIN_WIDTH", width)
    sweep.print_rows(rows)
    lines = capfd.readouterr().out.splitlines()
    title = " ".join(line for line in lines if line.startswith("┃"))
    assert {"num_draft_tokens", "temperature", "path", "status"} < set(title.split())
    assert " 1234.5 " in "".join(lines)
    assert max(map(len, lines)) == width
    assert "".join(lines).count("m") >= 90


def test_settings_in_a_plot_stay_apart():
    """Paths by the ends that tell them apart, however alike the rest is."""
    paths = [f"outputs/2026-01-31/{run}-of-a-long-name/head/last" for run in ("a", "b")]
    rows = [{"draft.path": path, "verify._target_": "x.y.greedy"} for path in (*paths, "one")]
    first, second, third = plots._swept(rows, ["draft.path", "verify._target_"])
    assert first == "path=a-of-a-long-name/head/last, verify=greedy"
    assert second == "path=b-of-a-long-name/head/last, verify=greedy"
    assert third == "path=one, verify=greedy"
    assert plots._swept(rows, []) == [""] * 3


def test_the_table_has_the_intervals(capfd):
    length = {"acceptance_length": 2.5}
    interval = {"acceptance_length_ci95_low": 2.125, "acceptance_length_ci95_high": 2.875}
    job = {"job": "a", "status": "done", **length}
    sweep.print_rows([{**job, "k": "1", **interval}, {**job, "k": "2"}])
    out = capfd.readouterr().out
    assert " 2.500 [2.125, 2.875] " in out
    assert " 2.500  " in out


def test_many_long_titles_make_a_file_wider_and_a_terminal_fold(monkeypatch, capfd):
    columns = [f"a_very_long_name_of_key_{n}" for n in range(6)]
    tables.print_table("t", columns, [["1"] * 6])
    out = capfd.readouterr().out
    assert all(f" {column} " in out for column in columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    tables.print_table("t", columns, [["1"] * 6])
    assert len(capfd.readouterr().out.splitlines()[-1]) <= 100  # the table's lower edge


def test_a_reader_that_leaves_early_is_no_traceback(tmp_path):
    command = [sys.executable, str(SCRIPT), "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
