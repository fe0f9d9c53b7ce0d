"""A run that is refused before it wrote anything leaves nothing behind."""

import importlib.util
import json
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from scripts import call, status_of, tiny_job

from specdec.errors import ConfigError
from specdec.experiments import acceptance, compare, pretrain
from specdec.experiments.jobs import hydra_script


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return [*tiny_job(tmp_path_factory.mktemp("refused")), "logger=none"]


def tree(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("propose.num_draft_tokens=-1", "propose.num_draft_tokens=-1 must be"),
        ("+typo=3", "unknown key typo"),
        ("+quantize=fp8", "unknown key quantize; did you mean target.quantize?"),
        ("draft.path=/no/such/head", "/no/such/head"),
        ("hydra.output_subdir=null propose=none verify=greedy sampling.temperature=1", "cannot"),
    ],
)
def test_no_folder_is_left(base, override, said, tmp_path, monkeypatch, capfd):
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    argv = [*base, "logger=wandb", *override.split(), f"hydra.run.dir={tmp_path}/runs/one/two"]
    before = HydraConfig.instance().cfg
    assert call(acceptance.main, argv, monkeypatch) == 1
    assert said in capfd.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
    assert HydraConfig.instance().cfg is before


def test_the_default_folder_goes_with_its_parents(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(acceptance.main, [*base, "+typo=3"], monkeypatch) == 1
    assert not list(tmp_path.iterdir())
    assert call(pretrain.main, ["tokenizer=t", "optimizer.lr=-1"], monkeypatch) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_there_stays_as_it_was(base, tmp_path, monkeypatch):
    """The record of an earlier run among its files."""
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    for name in ("status.json", "summary.json", "acceptance.log", ".hydra/config.yaml"):
        (tmp_path / "run" / name).write_text("of an earlier run\n")
    before = tree(tmp_path)
    argv = [*base, f"hydra.run.dir={tmp_path}/run", "propose.num_draft_tokens=-1"]
    assert call(acceptance.main, argv, monkeypatch) == 1
    assert tree(tmp_path) == before


def test_a_folder_named_by_way_of_one_that_is_not_there(base, tmp_path, monkeypatch):
    """Nothing but a record and a logger's folder lies in it, as a refused run would leave it."""
    log = tmp_path / "run" / "wandb" / "offline-run-1"
    log.mkdir(parents=True)
    (log / "rows").write_text("of an earlier run\n")
    (tmp_path / "run" / "status.json").write_text("of an earlier run\n")
    before = tree(tmp_path / "run")
    argv = [*base, f"hydra.run.dir={tmp_path}/new/../run", "propose.num_draft_tokens=-1"]
    assert call(acceptance.main, argv, monkeypatch) == 1
    assert tree(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hydra.run.dir={}/file"], "file: File exists"),
        (["hydra.run.dir={}/file/run"], "file/run: Not a directory"),
        (["hydra.run.dir={}", "hydra.output_subdir=file"], "file: File exists"),
        (["hydra.run.dir={}/run"], "propose.num_draft_tokens=-1 must be"),
        (["hydra.run.dir={}/new", "hydra.output_subdir={}/a/b"], "propose.num_draft_tokens=-1"),
        (["hydra.run.dir={}/${{nothing}}"], "Interpolation key 'nothing' not found"),
    ],
)
@pytest.mark.filterwarnings("error:Callback")  # what Hydra does with a failure while looking
def test_files_and_folders_in_the_way_stay(base, overrides, said, tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("mine\n")
    (tmp_path / "run" / "multirun.yaml").mkdir(parents=True)
    (tmp_path / "run" / "link").symlink_to("nowhere")
    before = tree(tmp_path)
    argv = [*base, "propose.num_draft_tokens=-1", *(text.format(tmp_path) for text in overrides)]
    assert call(acceptance.main, argv, monkeypatch) == 1
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert tree(tmp_path) == before


def test_the_log_of_another_process_stays(base, tmp_path, monkeypatch):
    """One that began to write to the same folder after the refused one had looked at it."""
    log = tmp_path / "run" / "wandb" / "offline-run-2"

    def refused(cfg, folder, run_log):
        log.mkdir(parents=True)
        (log / "rows").touch()
        raise ConfigError("no")

    monkeypatch.setattr(acceptance, "run", refused)
    assert call(acceptance.main, [*base, f"hydra.run.dir={tmp_path}/run"], monkeypatch) == 1
    assert (log / "rows").exists()


def test_a_run_that_began_to_write_keeps_its_record(base, tmp_path, monkeypatch, capfd):
    """Its own error, and a user's error after something was written."""

    def fails(cfg, folder, run_log):
        (folder / "half").touch()
        raise FileNotFoundError(2, "No such file", "late")

    monkeypatch.setattr(acceptance, "run", fails)
    assert call(acceptance.main, [*base, f"hydra.run.dir={tmp_path}/late"], monkeypatch) == 1
    assert status_of(tmp_path / "late")["error"] == "late: No such file"

    def breaks(cfg, folder, run_log):
        raise RuntimeError("a bug")

    monkeypatch.setattr(acceptance, "run", breaks)
    assert call(acceptance.main, [*base, f"hydra.run.dir={tmp_path}/bug"], monkeypatch) == 1
    assert status_of(tmp_path / "bug")["status"] == "failed"
    assert "a bug" in (tmp_path / "bug" / "acceptance.log").read_text()


def test_a_sweep_keeps_its_refused_jobs_and_no_folder_without_a_job(
    base, tmp_path, monkeypatch, capfd
):
    argv = ["-m", *base, f"hydra.sweep.dir={tmp_path}/grid"]
    assert call(acceptance.main, [*argv, "verify=rejection,rejecton"], monkeypatch) == 1
    assert not list(tmp_path.iterdir())
    assert call(acceptance.main, [*argv, "propose.num_draft_tokens=-1"], monkeypatch) == 1
    (status,) = [json.loads(path.read_text()) for path in tmp_path.rglob("status.json")]
    assert status["status"] == "failed"
    assert "propose.num_draft_tokens=-1 must be" in status["error"]
    assert (tmp_path / "grid" / "sweep.csv").exists()


@pytest.fixture(scope="module")
def serve():
    script = Path(__file__).resolve().parent.parent / "serve.py"
    spec = importlib.util.spec_from_file_location("serve", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main = hydra_script("serve", record=False)(module.serve)
    return module


@pytest.mark.parametrize(
    ("script", "argv", "said"),
    [
        ("compare", ["runs=/no/such/*"], "names no finished run"),
        ("compare", [], "runs has no value"),
        ("serve", ["+prot=9"], "did you mean 'port'"),
        ("serve", ["port=0", "target.path=/no/such"], "no checkpoint at /no/such"),
    ],
)
def test_scripts_without_a_record(script, argv, said, serve, tmp_path, monkeypatch, capfd):
    """No folder is left, and one that was there keeps what a user and an earlier run put there."""
    main = {"compare": compare, "serve": serve}[script].main
    monkeypatch.chdir(tmp_path)
    assert call(main, argv, monkeypatch) == 1
    assert said in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    for name in ("notes.txt", "compare.csv", "serve.log", ".hydra/config.yaml"):
        (tmp_path / "run" / name).write_text("mine\n")
    before = tree(tmp_path)
    assert call(main, [*argv, f"hydra.run.dir={tmp_path}/run"], monkeypatch) == 1
    assert tree(tmp_path) == before


@pytest.mark.parametrize("earlier", [None, "of an earlier run\n"])
def test_a_log_that_grew_stays(earlier, serve, tmp_path, monkeypatch, capfd):
    """By another server's lines in the same folder, or its own before it failed."""
    log = tmp_path / "run" / "serve.log"
    if earlier:
        log.parent.mkdir()
        log.write_text(earlier)

    def taken(host, port):
        with log.open("a") as file:
            file.write("of a running server\n")
        raise ConfigError("cannot listen")

    monkeypatch.setattr(serve, "listen", taken)
    assert call(serve.main, [f"hydra.run.dir={log.parent}"], monkeypatch) == 1
    assert "cannot listen" in capfd.readouterr().err
    assert log.read_text() == f"{earlier or ''}of a running server\n"
