"""W&B: one run a job, always ended, nothing lost, never waiting for a server that is not there."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from scripts import call, jobs_of, rows_of, summary_of, tiny_job

from specdec.errors import DataError
from specdec.experiments import acceptance
from specdec.experiments.loggers import JobInfo, wandb_run
from specdec.experiments.wandb_files import read_records, read_table, read_wandb


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return [*tiny_job(tmp_path_factory.mktemp("logged")), "data.num_prompts=2"]


def run_file(folder):
    """The record file of the one offline run of a folder, when W&B's process has written it."""
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    waited = time.monotonic()
    while time.monotonic() - waited < 10:
        with contextlib.suppress(DataError):
            if read_wandb(file).exit_code is not None:
                break
        time.sleep(0.01)
    return file


def test_each_job_of_a_sweep_is_a_run_of_its_own(base, tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    grid = tmp_path / "grid"
    argv = ["-m", *base, "propose.num_draft_tokens=1,-1,3", f"hydra.sweep.dir={grid}"]
    assert call(acceptance.main, argv, monkeypatch) == 1
    runs = []
    for job in jobs_of(grid):
        runs.append(read_wandb(run_file(job)))
    assert len({run.run_id for run in runs}) == 3
    assert [run.exit_code for run in runs] == [0, 1, 0]
    assert [run.config["propose"]["num_draft_tokens"] for run in runs] == [1, -1, 3]
    positions = [[row["position"] for row in r.history if "position" in row] for r in runs]
    assert positions == [[1], [], [1, 2, 3]]
    for index in (0, 2):
        job = jobs_of(grid)[index]
        file = run_file(job)
        summary = summary_of(job)
        told = {k: v for k, v in runs[index].summary.items() if k in summary}
        assert told == {k: v for k, v in summary.items() if k != "config"}
        table = read_table(file, runs[index], "per_prompt")
        assert [{k: str(v) for k, v in row.items()} for row in table] == rows_of(
            job / "per_prompt.csv"
        )


def test_online_without_a_key_is_told(tmp_path, monkeypatch, caplog):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for mode, told in (("offline", False), ("online", True)):
        caplog.clear()
        job = JobInfo(tmp_path / mode, {}, "name", "group", "eval")
        job.folder.mkdir()
        with wandb_run(job, mode=mode) as log:
            log.summary({"x": 1})
        assert read_wandb(run_file(job.folder)).summary["x"] == 1
        assert ("set WANDB_API_KEY" in caplog.text) == told


def test_no_row_is_dropped_for_an_earlier_step(tmp_path):
    job = JobInfo(tmp_path, {"a": {"b": 0.7}}, "name", "group", "eval")
    with wandb_run(job, mode="offline") as log:
        log.define_axis("step", "train/*")
        log.define_axis("position", "acceptance/*")
        log.log({"step": 100, "train/loss": 2.5})
        for position in range(4):
            log.log({"position": position, "acceptance/joint": position / 10})
    file = run_file(tmp_path)
    rows = read_wandb(file).history
    assert [row.get("step") for row in rows] == [100, None, None, None, None]
    assert [row["acceptance/joint"] for row in rows[1:]] == [0, 0.1, 0.2, 0.3]


def test_the_reader_agrees_with_wandbs_own(tmp_path):
    config = {"deep": {"list": [1, None, {"a": True}]}, "empty": {}}
    text = "x" * 70_000  # over several blocks
    with wandb_run(JobInfo(tmp_path, config, "n", None, "eval"), mode="offline") as log:
        log.summary({"values": [0.5, None], "nested": {"a": 1}, "text": text})
    file = run_file(tmp_path)
    run = read_wandb(file)
    assert run.config == config
    assert run.summary["values"] == [0.5, None]
    assert run.summary["nested"] == {"a": 1}
    assert run.summary["text"] == text
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kinds = [json.loads(line)["type"] for line in lines.splitlines()]
    assert kinds.count("run") == 1
    assert len(list(read_records(file))) == len(kinds)

    data = file.read_bytes()
    cut = tmp_path / "cut.wandb"
    cut.write_bytes(data[: len(data) * 9 // 10])
    assert read_wandb(cut).exit_code is None
    assert read_wandb(cut).config == config
    cut.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    with pytest.raises(DataError, match="damaged"):
        read_wandb(cut)
    cut.write_bytes(b"something else")
    with pytest.raises(DataError, match="no W&B record file"):
        read_wandb(cut)


CLIENT = """
import sys
from pathlib import Path
from specdec.experiments.loggers import JobInfo, wandb_run
for name in sys.argv[1:]:
    with wandb_run(JobInfo(Path(name), {}, "n", None, "eval")) as log:
        log.log({"x": 1})
"""


def hold_connections(answers_probe):
    """A port of this machine that takes every connection and never answers, or the probe only."""
    listener = socket.create_server(("127.0.0.1", 0))
    held = []

    def answer(connection):
        if b"healthz" in connection.recv(65536):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            connection.close()

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            if answers_probe:
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


@pytest.mark.parametrize(
    "answers_probe", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["silent", "half"]
)
def test_a_server_that_never_answers_costs_seconds(answers_probe, tmp_path):
    listener = hold_connections(answers_probe)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    env["WANDB_BASE_URL"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
    env["WANDB_API_KEY"] = "a" * 40
    began = time.monotonic()
    command = [sys.executable, "-c", CLIENT, *map(str, folders)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    seconds = time.monotonic() - began
    listener.close()
    assert done.returncode == 0, done.stderr
    assert "offline" in done.stderr
    assert seconds < 25
    for folder in folders:
        file = run_file(folder)
        run = read_wandb(file)
        assert run.exit_code == 0
        assert [row["x"] for row in run.history] == [1]
