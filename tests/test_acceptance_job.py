"""The main job through its command line: files, sweeps, W&B runs, a user's own rule, bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_chat
from scripts import PROMPTS, call, jobs_of, rows_of, summary_of, tiny_job

import specdec.experiments
from specdec.experiments import acceptance, sweep

SCRIPT = Path(specdec.experiments.__file__).with_name("acceptance.py")
FILES = ("summary.json", "per_prompt.csv", "acceptance.png", "status.json", "outputs.jsonl")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Overrides that run a tiny random pair over six prompts in fp32."""
    return tiny_job(tmp_path_factory.mktemp("job"))


def wandb_records(folder):
    """Records of the one offline run below a run folder, by type."""
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records: dict[str, list] = {}
    for record in map(json.loads, lines.splitlines()):
        records.setdefault(record["type"], []).append(record[record["type"]])
    return records


def test_a_sweep_gives_a_folder_and_a_run_each_and_one_table(base, tmp_path, monkeypatch, capfd):
    axes = ["propose.num_draft_tokens=1,2,4", "sampling.temperature=0,0.7"]
    argv = ["-m", *base, *axes, "data.system_prompt='w9 w10'", f"hydra.sweep.dir={tmp_path}/grid"]
    assert call(acceptance.main, argv, monkeypatch) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "sweep.csv" in out
    grid = tmp_path / "grid"
    jobs = jobs_of(grid)
    assert {p for p in grid.iterdir() if p.is_dir()} == set(jobs)
    assert len(jobs) == 6
    assert "num_draft_tokens-4_temperature-0.7_" in jobs[-1].name
    for job in jobs:
        assert all((job / name).stat().st_size for name in FILES)
    runs = [next((job / "wandb").glob("offline-run-*/*.wandb")).name for job in jobs]
    assert len(set(runs)) == 6

    table = rows_of(grid / "sweep.csv")
    assert (grid / "sweep.png").stat().st_size
    assert [row["status"] for row in table] == ["done"] * 6
    assert [row["propose.num_draft_tokens"] for row in table] == ["1", "1", "2", "2", "4", "4"]
    assert [row["sampling.temperature"] for row in table] == ["0", "0.7"] * 3
    for row, job in zip(table, jobs, strict=True):
        summary = summary_of(job)
        assert float(row["acceptance_length"]) == summary["acceptance_length"]
        assert float(row["acceptance_length_ci95_low"]) == summary["acceptance_length_ci95"][0]
        joint = summary["per_position_joint"]
        assert [float(row[f"per_position_joint_{j + 1}"]) for j in range(len(joint))] == joint
    assert len({row["output_sha256"] for row in table if row["sampling.temperature"] == "0"}) == 1

    records = wandb_records(jobs[3])
    run = records["run"][0]
    assert run["config"]["update"]["sampling"]["temperature"] == 0.7
    assert run["config"]["update"]["data"]["system_prompt"] == "w9 w10"
    assert "${" not in json.dumps(run["config"])
    assert run["run_group"] == "grid"
    assert run["job_type"] == "eval"
    assert "sampling.temperature=0.7" in run["display_name"]
    history = [item["item"] for item in records["history"] if "position" in item["item"]]
    assert [row["position"] for row in history] == [1, 2]
    assert [row["per_position/joint"] for row in history] == summary_of(jobs[3])[
        "per_position_joint"
    ]
    assert records["exit"][0].get("exit_code", 0) == 0

    written = (grid / "sweep.csv").read_text()
    (grid / "sweep.csv").unlink()
    assert call(sweep.main, [f"dir={grid}"], monkeypatch) == 0
    assert (grid / "sweep.csv").read_text() == written


def test_one_bad_job_leaves_the_others_and_says_why(base, tmp_path, monkeypatch, capfd):
    axes = ["propose.num_draft_tokens=2,-1,4", f"hydra.sweep.dir={tmp_path}"]
    assert call(acceptance.main, ["-m", *base, *axes], monkeypatch) == 1
    _, err = capfd.readouterr()
    assert len(err.splitlines()) == 1
    assert "propose.num_draft_tokens=-1 must be" in err
    table = rows_of(tmp_path / "sweep.csv")
    assert [row["status"] for row in table] == ["done", "failed", "done"]
    assert "propose.num_draft_tokens=-1 must be" in table[1]["error"]
    assert table[1]["acceptance_length"] == ""
    assert all(float(table[i]["acceptance_length"]) >= 1 for i in (0, 2))
    jobs = jobs_of(tmp_path)
    assert "Traceback" in (jobs[1] / "acceptance.log").read_text()
    assert json.loads((jobs[1] / "status.json").read_text())["status"] == "failed"
    codes = [wandb_records(job)["exit"][0].get("exit_code", 0) for job in jobs]
    assert codes[0] == codes[2] == 0
    assert codes[1] != 0


def test_a_users_rule_is_found_on_pythonpath(base, tmp_path, monkeypatch, capfd):
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "my_rules.py").write_text(
        "from specdec.verify.rejection import rejection\n"
        "def never(dist, drafts, keys, *, limit):\n"
        "    if limit < 0:\n"
        "        raise RuntimeError('a bug of my own')\n"
        "    return rejection(dist, drafts, keys)\n"
    )
    work = tmp_path / "work"
    work.mkdir()
    rule = ["verify._target_=my_rules.never", "logger=none", "hydra.run.dir=run"]
    env = {**os.environ, "PYTHONPATH": str(package), "WANDB_MODE": "disabled"}

    command = [sys.executable, str(SCRIPT), *base, *rule, "+verify.limit=3"]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    summary = summary_of(work / "run")
    assert summary["config"]["verify"]["_target_"] == "my_rules.never"
    assert summary["config"]["verify"]["limit"] == 3
    assert summary["acceptance_length"] >= 1
    assert not (work / "run" / "wandb").exists()

    monkeypatch.syspath_prepend(package)
    monkeypatch.chdir(work)
    assert call(acceptance.main, [*base, *rule, "+verify.limit=-1"], monkeypatch) == 1
    err = capfd.readouterr().err
    assert "a bug of my own" in err
    assert "my_rules.py" in err  # no mistake in the input: the traceback is shown
    assert call(acceptance.main, [*base, *rule, "+verify.limitt=3"], monkeypatch) == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert "did you mean 'limit'" in err


@pytest.fixture(scope="module")
def conversation(base, tmp_path_factory):
    """A run over all turns with two samples and the baseline; its folder."""
    folder = tmp_path_factory.mktemp("conversation")
    argv = [*base, "data.turns=all", "data.num_prompts=4", "sampling.num_samples=2"]
    argv += ["measure_baseline=true", "sampling.temperature=0.9", "verify=gumbel", "logger=none"]
    with pytest.MonkeyPatch.context() as patch:
        assert call(acceptance.main, [*argv, f"hydra.run.dir={folder}"], patch) == 0
    return folder


def test_the_summary_holds_what_was_promised(conversation):
    summary = summary_of(conversation)
    assert set(summary) >= {
        *("acceptance_length", "acceptance_length_ci95", "mean_acceptance_length"),
        *("acceptance_rate", "per_position_conditional", "per_position_joint"),
        *("num_verify_rounds", "num_drafted", "num_accepted", "num_output_tokens"),
        *("repeated_8gram_share", "tokens_per_second", "baseline_tokens_per_second", "speedup"),
        *("output_sha256", "bytes_per_round", "config", "device", "versions"),
    }
    rate, plain = summary["tokens_per_second"], summary["baseline_tokens_per_second"]
    assert summary["speedup"] == pytest.approx(rate / plain)
    low, high = summary["speedup_ci95"]
    assert (low is None and high is None) or low <= high
    assert summary["num_draft_tokens"] == 4
    assert summary["config"]["data"]["num_prompts"] == 4
    assert summary["versions"]["torch"]


def test_rows_are_ordered_and_add_up_to_the_summary(conversation):
    summary, rows = summary_of(conversation), rows_of(conversation / "per_prompt.csv")
    order = [(row["prompt_id"], row["turn"], row["sample"]) for row in rows]
    ids = list(dict.fromkeys(row["prompt_id"] for row in rows))
    assert ids == [row["question_id"] for row in PROMPTS if row["question_id"] in ids]
    assert order == [(p, t, s) for p in ids for t in "01" for s in "01"]
    rounds = sum(int(row["rounds"]) for row in rows)
    assert rounds == summary["num_verify_rounds"]
    committed = sum(int(row["num_tokens"]) - 1 for row in rows)
    assert summary["acceptance_length"] == pytest.approx(committed / rounds)
    kept = sum(int(row[f"accepted_{j}"]) for row in rows for j in (1, 2, 3, 4))
    assert kept == summary["num_accepted"]
    assert summary["num_output_tokens"] == committed + len(rows)
    first, second = rows[0], rows[1]
    assert first["text_sha256"] != second["text_sha256"]  # each sample has its own seed


def test_the_second_turn_reads_the_first_answer(conversation, base):
    from specdec.experiments.decoding import request_seed
    from specdec.generate import generate
    from specdec.prompts import jsonl, render
    from specdec.schedule import Request

    outputs = [json.loads(x) for x in (conversation / "outputs.jsonl").read_text().splitlines()]
    first, second = outputs[1], outputs[3]  # sample 1 of both turns
    assert (first["turn"], second["turn"], second["sample"]) == (0, 1, 1)
    bound, models, cfg = engine_parts([*base, "verify=gumbel", "sampling.temperature=0.9"])
    prompts = jsonl(cfg.data.path, turns="all")
    ids = tuple(render(prompts, prompts.prompts[0], models.tokenizer, [first["text"]]))
    from specdec.build import build_engine

    engine = build_engine(cfg, models, bound, longest=len(ids) + 12, num_requests=1)
    seed = request_seed(0, "q0", 1, 1)
    request = Request(prompt_ids=ids, max_tokens=12, temperature=0.9, seed=seed)
    assert list(generate(engine, [request])[0].token_ids) == second["token_ids"]


def engine_parts(overrides):
    from hydra import compose, initialize_config_module

    from specdec.build import build_stages, load_models
    from specdec.config import register_schemas

    register_schemas()
    with initialize_config_module("specdec.conf", version_base="1.3"):
        cfg = compose("config", overrides=overrides)
    bound = build_stages(cfg)
    return bound, load_models(cfg, uses_draft=bound.uses_draft), cfg


def test_the_gumbel_rule_gives_the_tokens_of_plain_sampling(base, tmp_path, monkeypatch):
    argv = ["-m", *base, "verify=gumbel", "sampling.temperature=1", "logger=none"]
    argv += ["propose=none,autoregressive,ngram", f"hydra.sweep.dir={tmp_path}"]
    assert call(acceptance.main, argv, monkeypatch) == 0
    summaries = [summary_of(job) for job in jobs_of(tmp_path)]
    assert len({s["output_sha256"] for s in summaries}) == 1
    plain, drafted, _ = summaries
    assert plain["num_draft_tokens"] == plain["num_drafted"] == 0
    assert plain["config"]["propose"]["num_draft_tokens"] == 0
    assert plain["acceptance_length"] == 1.0
    assert drafted["num_drafted"] > 0


def test_answers_that_ended_in_an_error_are_counted(base, tmp_path, monkeypatch, capfd):
    """A target whose weights are not numbers: nothing is written, and the table says why."""
    from safetensors.torch import load_file, save_file

    folder = tiny_chat.write_chat_model(tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors")
    out = tmp_path / "run"
    argv = [*base, f"target.path={folder}", "propose=none", "logger=none", f"hydra.run.dir={out}"]
    assert call(acceptance.main, argv, monkeypatch) == 0
    assert summary_of(out)["num_errors"] == 6
    assert "6: logits that are not numbers" in capfd.readouterr().out


def test_without_a_draft_model_none_is_loaded(base, tmp_path, monkeypatch, capfd):
    argv = [*base, "draft.path=/no/such/head", "logger=none", f"hydra.run.dir={tmp_path}"]
    assert call(acceptance.main, [*argv, "propose=ngram"], monkeypatch) == 0
    capfd.readouterr()
    assert call(acceptance.main, argv, monkeypatch) == 1
    assert "/no/such/head" in capfd.readouterr().err


def test_wandb_disabled_or_without_a_key_never_asks(base, tmp_path, monkeypatch):
    argv = [*base, "data.num_prompts=2", f"hydra.run.dir={tmp_path}/a"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert call(acceptance.main, argv, monkeypatch) == 0
    assert not list(tmp_path.glob("a/wandb/*run-*"))
    assert summary_of(tmp_path / "a")["num_prompts"] == 2
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    assert call(acceptance.main, [*argv[:-1], f"hydra.run.dir={tmp_path}/b"], monkeypatch) == 0
    assert len(list(tmp_path.glob("b/wandb/offline-run-*"))) == 1


def test_prompts_are_the_same_in_every_run(base, tmp_path, monkeypatch):
    argv = [*base, "data.num_prompts=3", "logger=none", "propose=none"]
    for name, more in (("a", []), ("b", ["seed=5", "sampling.temperature=1"])):
        run = [*argv, *more, f"hydra.run.dir={tmp_path}/{name}"]
        assert call(acceptance.main, run, monkeypatch) == 0
    ids = [[r["prompt_id"] for r in rows_of(tmp_path / n / "per_prompt.csv")] for n in "ab"]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 3


LOST = "model.layers.1.mlp.up_proj.weight"
BAD_INPUTS = {
    "typo": ("propose.num_spec_tokns=4", "num_spec_tokns"),
    "typo with +": ("+propose.num_spec_tokns=4", "num_spec_tokns"),
    "another engine's name": ("propose.num_speculative_tokens=4", "propose.num_draft_tokens"),
    "typo in hydra": ("+hydra.swep.dir=x", "hydra.swep"),
    "not a group": ("propose.method=ngram", "propose.method"),
    "no such option": ("verify=rejecton", "did you mean 'rejection'"),
    "bad value": ("sampling.top_p=7", "sampling.top_p=7"),
    "bad syntax": ("sampling.top_p=[", "sampling.top_p=["),
    "no checkpoint": ("target.path=/no/such/model", "/no/such/model"),
    "no draft": ("draft.path=pretrained/nothing", "pretrained/nothing"),
    "a tensor is missing": ("target.path={bad}/torn", LOST),
    "a prompt beyond the context": ("data.path={bad}/long.jsonl", "'big'"),
    "an empty prompt file": ("data.path={bad}/empty.jsonl", "empty.jsonl is empty"),
    "no prompt file": ("data.path=/no/such.jsonl", "/no/such.jsonl"),
    "a set without a path": ("data=mt_bench data.path=null", "data.path"),
    "too many prompts": ("data.num_prompts=99", "data.num_prompts=99"),
    "no such rule": ("verify._target_=nowhere.rule", "nowhere"),
    "greedy above zero": ("verify=greedy sampling.temperature=1", "verify=greedy"),
    "a small budget": ("schedule.max_num_batched_tokens=3", "max_num_batched_tokens=3"),
    "few blocks": ("cache.num_blocks=2", "num_blocks"),
}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    row = {"question_id": "big", "prompt": "w9 " * 600}
    (folder / "long.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "empty.jsonl").write_text("\n")
    config = tiny.tiny_config()
    state = {name: t for name, t in tiny.tiny_state(config).items() if name != LOST}
    tiny.write_checkpoint(folder / "torn", config, state)
    return folder


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_one_clear_line(case, base, bad_files, tmp_path, monkeypatch, capfd):
    overrides, named = BAD_INPUTS[case]
    overrides = [part.format(bad=bad_files) for part in overrides.split(" ")]
    argv = [*base, "logger=none", *overrides, f"hydra.run.dir={tmp_path}/run"]
    assert call(acceptance.main, argv, monkeypatch) == 1
    _, err = capfd.readouterr()
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert named in err
    assert not (tmp_path / "run" / "summary.json").exists()


def test_the_demo_decodes_the_same_prompts_with_every_row(base, tmp_path, monkeypatch, capfd):
    from specdec.experiments import demo

    monkeypatch.chdir(tmp_path)
    rows = demo.run(base, seconds=0.5)
    assert [(row["drafts"], row["temperature"]) for row in rows] == [
        *(("plain", 0), ("n-gram, K=4", 0), ("head, K=1", 0), ("head, K=2", 0), ("head, K=4", 0)),
        *(("plain", 1), ("head, K=2", 1)),
    ]
    assert len({row["num_output_tokens"] for row in rows[:5]}) == 1
    assert [rows[i]["speedup"] for i in (0, 5)] == [1, 1]
    assert [rows[i]["acceptance_length"] for i in (0, 5)] == [1, 1]
    assert "head, K=4" in capfd.readouterr().out
    assert len(rows_of(Path("outputs/demo/demo.csv"))) == 7
    assert Path("outputs/demo/demo.png").stat().st_size


def test_the_demo_says_how_it_is_called_and_what_is_wrong(tmp_path, monkeypatch, capfd):
    from specdec.experiments import demo

    monkeypatch.chdir(tmp_path)
    assert call(demo.main, ["--help"], monkeypatch) == 0
    assert "python experiments/demo.py [KEY=VALUE ...]" in capfd.readouterr().out
    assert "verify=none" in str(call(demo.main, ["verify=none"], monkeypatch))
    assert not (tmp_path / "outputs").exists()


def test_rebuilding_a_table_of_nothing_is_one_line(tmp_path, monkeypatch, capfd):
    assert call(sweep.main, [f"dir={tmp_path}"], monkeypatch) == 1
    assert "status.json" in capfd.readouterr().err
    assert call(sweep.main, [], monkeypatch) == 1
    assert "dir has no value" in capfd.readouterr().err
