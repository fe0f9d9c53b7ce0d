"""A job's folder has one process at a time that writes to it, whatever ends the process."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest
from scripts import call, rows_of, status_of, tiny_job

import specdec.experiments
from specdec.experiments import acceptance, locks, sweep

SCRIPT = Path(specdec.experiments.__file__).with_name("acceptance.py")
RULES = """
import os, time
from pathlib import Path
from specdec.verify.rejection import rejection

def pausing(dist, drafts, keys):
    flag = Path(os.environ["STOP_FLAG"])
    while flag.exists():
        flag.with_suffix(".reached").touch()
        time.sleep(0.02)
    return rejection(dist, drafts, keys)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return [*tiny_job(tmp_path_factory.mktemp("locks")), "logger=none", "data.num_prompts=2"]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts acceptance.py as a process whose output goes to the file that it returns; its jobs
    wait while the file `stop` is there."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "own_rules.py").write_text(RULES)
    (tmp_path / "stop").touch()
    monkeypatch.setenv("STOP_FLAG", str(tmp_path / "stop"))
    processes = []

    def new(*argv):
        said = tmp_path / f"said{len(processes)}"
        with said.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *argv, "verify._target_=own_rules.pausing"],
                env={**os.environ, "PYTHONPATH": str(tmp_path / "rules")},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.append(process)
        return process, said

    yield new
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(holds, process):
    waited = time.monotonic()
    while not holds():
        assert process.poll() is None, "the command has ended"
        assert time.monotonic() - waited < 90
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("launcher", "killed"),
    [
        ("basic", False),
        ("basic", True),
        pytest.param("joblib", False, marks=pytest.mark.slow),
        pytest.param("joblib", True, marks=pytest.mark.slow),
    ],
)
def test_two_commands_in_one_sweep_folder_share_its_jobs(base, start, launcher, killed, tmp_path):
    folder = tmp_path / "both"
    argv = ["-m", *base, "propose.num_draft_tokens=1,2", f"hydra.sweep.dir={folder}"]
    first, first_said = start(*argv)
    wait_until((tmp_path / "stop.reached").exists, first)
    (running,) = sweep.read_jobs(folder)
    record = status_of(folder / running["job"])
    more = ["launcher=joblib", "hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    second, second_said = start(*argv, *more)
    line = f"job {running['job']} is being run by process {first.pid}: waiting for its end"
    wait_until(lambda: line in second_said.read_text(), second)
    assert status_of(folder / running["job"]) == record
    if killed:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    (tmp_path / "stop").unlink()
    processes = [(second, second_said)] if killed else [(first, first_said), (second, second_said)]
    for process, said in processes:
        assert process.wait(timeout=90) == 0
        assert "error" not in said.read_text()
        table = said.read_text().rpartition("sweep\n")[2]
        assert table.count("│ done ") == 2
    told = first_said.read_text() + second_said.read_text()
    assert told.count("results: ") == 2  # each job was run once
    assert told.count("is done already: skipped") == (0 if killed else 2)
    assert (status_of(folder / running["job"])["process"] == record["process"]) is not killed
    assert [row["status"] for row in rows_of(folder / "sweep.csv")] == ["done", "done"]
    assert not list(folder.rglob("*lock"))
    assert not list(folder.rglob("*.part"))


def test_a_run_into_a_folder_in_use_is_refused(base, start, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "run"
    process, said = start(*base, f"hydra.run.dir={folder}")
    wait_until((tmp_path / "stop.reached").exists, process)
    before = {p: (p.stat().st_mtime_ns, p.is_dir() or p.read_bytes()) for p in folder.rglob("*")}
    for more in ("propose.num_draft_tokens=2", "propose.num_draft_tokens=-1"):
        assert call(acceptance.main, [*base, f"hydra.run.dir={folder}", more], monkeypatch) == 1
        err = capfd.readouterr().err
        assert err.count("\n") == 1
        assert f"hydra.run.dir={folder} is being written by process {process.pid};" in err
    after = {p: (p.stat().st_mtime_ns, p.is_dir() or p.read_bytes()) for p in folder.rglob("*")}
    assert after == before
    (tmp_path / "stop").unlink()
    assert process.wait(timeout=90) == 0, said.read_text()
    assert status_of(folder)["status"] == "done"
    assert not (folder / ".lock").exists()


def test_a_lock_outlives_neither_its_file_nor_its_holder(tmp_path):
    path = tmp_path / ".lock"
    path.write_text("elsewhere/1")  # of a process that was killed
    lock = locks.acquire(path, wait=False)
    assert locks.acquire(path, wait=False) is None
    assert locks.holder(path) == f"process {os.getpid()}"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(locks.acquire, path, wait=True)
        with pytest.raises(FutureTimeout):
            waiting.result(timeout=0.3)
        locks.release(lock)
        second = waiting.result(timeout=30)
    assert os.path.samestat(path.stat(), os.fstat(second.file))  # not of the file taken away
    assert locks.acquire(path, wait=False) is None
    path.unlink()  # by a user; the next one's file stays
    third = locks.acquire(path, wait=False)
    locks.release(second)
    assert path.exists()
    locks.release(third)
    assert not path.exists()


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with locks.held(tmp_path / ".lock"):
        pass
    assert "Function not implemented" in caplog.text
    assert not list(tmp_path.iterdir())
