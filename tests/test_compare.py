"""Comparing runs: real ones in every form, written ones for each refusal and kind of pair."""

import csv
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scripts import call, jobs_of, rows_of, summary_of, tiny_job

from specdec import metrics
from specdec.experiments import acceptance, compare
from specdec.experiments.naming import name_runs, short_names, short_paths
from specdec.experiments.runs import Run, find_runs
from specdec.significance import holm, swap_p_value

CONFIG = {
    "target": {"path": "models/a"},
    "data": {"path": "p.jsonl", "chat_template": None, "system_prompt": None, "num_prompts": None},
    "sampling": {
        "temperature": 0.0,
        "top_k": None,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_tokens": 64,
        "ignore_eos": False,
        "num_samples": 1,
    },
    "propose": {"_target_": "specdec.propose.ngram.ngram", "num_draft_tokens": 2},
    "schedule": {"max_num_seqs": 8},
    "seed": 0,
}
SUMMARY = {
    "dtype": "float32",
    "device_name": "cpu (x)",
    "num_threads": 1,
    "tokens_per_second": 50.0,
    "target_sha256": "t",
    "template_sha256": "c",
    "prompts_sha256": "p",
    "choices": {"propose": "ngram", "verify": "rejection"},
}


def write_run(folder, *, seed=0, gain=0.0, ids=range(9), texts="same", rows=None, **changes):
    """A run folder without a run: outputs of 30 tokens; `gain` lowers the number of rounds.

    Args:
        texts: what each text's hash begins with.
        changes: `summary` and configuration values, by keys with a double underscore for a dot.
    """
    rng = np.random.default_rng(seed)
    config, summary = json.loads(json.dumps(CONFIG)), {**SUMMARY, **changes.pop("summary", {})}
    for key, value in changes.items():
        group, _, name = key.partition("__")
        if name:
            config[group][name] = value
        else:
            config[group] = value
    k = config["propose"]["num_draft_tokens"]
    if rows is None:
        rounds = np.maximum(1, np.round(rng.integers(12, 25, len(ids)) * (1 - gain))).astype(int)
        rows = [
            {
                "prompt_id": f"q{i}",
                "turn": 0,
                "category": "math",
                "sample": 0,
                "text_sha256": f"{texts}{i}",
                "num_tokens": 30,
                "rounds": n,
                "expected_rounds": "",
                "var_rounds": "",
                "seconds": 1.0,
                **{f"accepted_{j}": n // (2 * j) for j in range(1, k + 1)},
                **{f"drafted_{j}": n for j in range(1, k + 1)},
            }
            for i, n in zip(ids, rounds, strict=True)
        ]
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({**summary, "config": config}))
    with (folder / "per_prompt.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def run_compare(folder, runs, monkeypatch, *more):
    """Exit status and rows of compare.csv."""
    joined = ",".join(f"'{run}'" for run in runs)
    code = call(compare.main, [f"runs=[{joined}]", f"hydra.run.dir={folder}", *more], monkeypatch)
    return code, rows_of(folder / "compare.csv") if (folder / "compare.csv").exists() else []


RECALL = """
import json, os
from pathlib import Path
import torch
from specdec.propose import texts_after
from specdec.state import Drafts

def recalling(state, batch, committed, out, draft, *, num_draft_tokens):
    lines = Path(os.environ["RECALLED"]).read_text().splitlines()
    known = [json.loads(line)["token_ids"] for line in lines]
    texts, drafts = texts_after(state, batch, committed), []
    for row, slot in enumerate(batch.request_slots.tolist()):
        start, end = int(state.prompt_len[slot]), int(committed.num_tokens[row])
        said = texts[row, start:end].tolist()
        fitting = [ids for ids in known if ids[: len(said)] == said] or [[]]
        ahead = fitting[0][len(said) : len(said) + num_draft_tokens]
        drafts.append(ahead + [0] * (num_draft_tokens - len(ahead)))
    ids = torch.tensor(drafts, dtype=torch.int64).reshape(len(drafts), num_draft_tokens)
    return Drafts(ids, torch.ones_like(ids, dtype=torch.bool),
                  torch.full((len(drafts),), num_draft_tokens))
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A sweep of real runs: a poor head, and a drafter that knows the answers, K = 1 and 4."""
    folder = tmp_path_factory.mktemp("compare")
    argv = [*tiny_job(folder), "sampling.max_tokens=24"]
    (folder / "recall.py").write_text(RECALL)
    head = "specdec.propose.autoregressive.autoregressive"
    axes = [f"propose._target_={head},recall.recalling", "propose.num_draft_tokens=1,4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("RECALLED", str(folder / "plain" / "outputs.jsonl"))
        plain = [*argv, "propose=none", "logger=none", f"hydra.run.dir={folder}/plain"]
        assert call(acceptance.main, plain, patch) == 0
        swept = ["-m", *argv, *axes, f"hydra.sweep.dir={folder}/grid"]
        assert call(acceptance.main, swept, patch) == 0
    assert [row["status"] for row in rows_of(folder / "grid" / "sweep.csv")] == ["done"] * 4
    return folder / "grid"


def test_a_known_difference_of_real_runs(grid, tmp_path, monkeypatch, capfd):
    jobs = jobs_of(grid)
    assert jobs[3].name.startswith("propose-recalling_num_draft_tokens-4_")
    lengths = [summary_of(job)["acceptance_length"] for job in jobs]
    code, pairs = run_compare(tmp_path / "two", jobs[2:], monkeypatch)
    assert code == 0
    (pair,) = pairs
    assert list(pair)[:6] == ["a", "b", "difference", "ci95_low", "ci95_high", "p_holm"]
    assert (pair["a"], pair["b"]) == (jobs[2].name, jobs[3].name)
    difference, low, high = (float(pair[k]) for k in ("difference", "ci95_low", "ci95_high"))
    assert difference == pytest.approx(lengths[2] - lengths[3], abs=1e-12)
    assert low < difference < high < -0.5  # K = 1 keeps one draft, K = 4 nearly four
    assert float(pair["p_holm"]) == pytest.approx(2 / 2**6)  # the least that six prompts can give
    assert pair["pairing"] == "paired"
    speeds = [summary_of(job)["tokens_per_second"] for job in jobs[2:]]
    assert float(pair["speed_ratio"]) == pytest.approx(speeds[0] / speeds[1])
    out = capfd.readouterr().out
    assert f"{difference:.3f}" in out
    assert (tmp_path / "two" / "compare.png").read_bytes()[:4] == b"\x89PNG"

    # two drafters, by the sweep's folder and a filter
    wanted = "filter={propose.num_draft_tokens:4}"
    code, (pair,) = run_compare(tmp_path / "four", [grid], monkeypatch, wanted)
    assert code == 0
    assert float(pair["difference"]) == pytest.approx(lengths[1] - lengths[3], abs=1e-12)
    assert float(pair["ci95_high"]) < -1
    labels = (pair["label_a"], pair["label_b"])
    assert labels == ("propose=autoregressive", "propose=recalling")


def test_wandb_runs_say_the_same_as_their_folders(grid, tmp_path, monkeypatch):
    code, folders = run_compare(tmp_path / "a", [grid], monkeypatch)
    assert code == 0
    assert len(folders) == 6
    links = grid / "*" / "wandb" / "*run*"  # with the links to the latest
    code, logged = run_compare(tmp_path / "b", [links], monkeypatch)
    assert code == 0
    named = ("label_a", "label_b")
    numbers = {tuple(sorted(r[n] for n in named)): abs(float(r["difference"])) for r in folders}
    assert numbers == {
        tuple(sorted(r[n] for n in named)): abs(float(r["difference"])) for r in logged
    }
    (file,) = next(iter(sorted(grid.glob("*/wandb")))).glob("offline-run-*/*.wandb")
    cut = tmp_path / "offline-run-x" / "run-x.wandb"
    cut.parent.mkdir()
    cut.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match="never ended"):
        find_runs([str(cut)])


def test_the_page_holds_everything(grid, tmp_path, monkeypatch):
    import base64

    code, _ = run_compare(tmp_path, [grid], monkeypatch)
    assert code == 0
    page = (tmp_path / "compare.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 1
    head, _, image = sources[0].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(image) == (tmp_path / "compare.png").read_bytes()
    assert page.count("<table>") == page.count("</table>") == 2
    assert page.count("<tr>") == 1 + 4 + 1 + 6
    assert "propose=recalling, K=4" in page


def test_a_run_with_itself_differs_by_nothing(grid, tmp_path, monkeypatch):
    job = jobs_of(grid)[1]
    code, (pair,) = run_compare(tmp_path, [job, job], monkeypatch)
    assert code == 0
    assert [pair[k] for k in ("difference", "ci95_low", "ci95_high")] == ["0.0"] * 3
    assert float(pair["p_holm"]) == 1
    assert float(pair["differing_texts"]) == 0
    assert float(pair["speed_ratio"]) == 1
    assert pair["a"] != pair["b"]


def hashes(**values):
    return {"summary": {f"{name}_sha256": value for name, value in values.items()}}


SAMPLED = {"sampling__temperature": 0.7}
REFUSALS = {
    "another target": (hashes(target="u") | {"target__path": "models/b"}, {}, "target.path"),
    "a target in fp8": ({"target__quantize": "fp8"}, {}, "target.quantize is fp8 in a"),
    "a target that was replaced": (hashes(target="u"), {}, "target"),
    "another template": (hashes(template="d"), {}, "template"),
    "another system prompt": (
        hashes(template="d") | {"data__system_prompt": "w9"},
        {},
        "data.system_prompt",
    ),
    "another temperature": (SAMPLED, {}, "sampling.temperature is 0.7"),
    "another top-p": (SAMPLED | {"sampling__top_p": 0.9}, SAMPLED, "sampling.top_p is 0.9"),
    "another penalty": (
        {"sampling__presence_penalty": 0.5},
        {},
        "sampling.presence_penalty is 0.5",
    ),
    "another limit": ({"sampling__max_tokens": 65}, {}, "sampling.max_tokens is 65"),
    "other prompts": ({"ids": range(3, 12)}, {}, "prompt_id: 'q0'"),
    "fewer prompts": (
        {"ids": range(4), "data__num_prompts": 4},
        {},
        "prompt_id: 'q4' is in b only (4 and 9 outputs; data.num_prompts is 4",
    ),
    "other words": (hashes(prompts="x") | {"data__path": "q.jsonl"}, {}, "data.path is q.jsonl"),
    "other greedy texts": ({"texts": "other"}, {}, "text_sha256"),
}


@pytest.mark.parametrize(("changed", "common", "named"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_paired_is_refused_by_its_key(
    changed, common, named, tmp_path, monkeypatch, capfd
):
    a = write_run(tmp_path / "a", **{**common, **changed})
    b = write_run(tmp_path / "b", **common)
    code, pairs = run_compare(tmp_path / "out", [a, b], monkeypatch)
    assert code == 1
    assert pairs == []
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert "a and b cannot be paired" in err
    assert named in err


def test_settings_that_change_nothing_are_not_refused(tmp_path, monkeypatch):
    a = write_run(tmp_path / "a", sampling__top_k=0, sampling__top_p=0.5, seed=3)
    off = {"sampling__repetition_penalty": 1.0, "sampling__presence_penalty": 0.0}
    off |= {"target__quantize": "none"}
    b = write_run(tmp_path / "b", sampling__top_k=None, seed=3, **off)  # filters do not matter
    code, (pair,) = run_compare(tmp_path / "out", [a, b], monkeypatch)
    assert code == 0
    assert float(pair["difference"]) == 0
    for name, top_k in (("c", -1), ("d", None)):  # both are off
        write_run(tmp_path / name, sampling__top_k=top_k, **SAMPLED)
    assert run_compare(tmp_path / "o", [tmp_path / n for n in "cd"], monkeypatch)[0] == 0


def test_texts_that_may_differ_are_labelled(tmp_path, monkeypatch, capfd):
    half = {"summary": {"dtype": "bfloat16"}}
    a = write_run(tmp_path / "a", **half)
    rows = rows_of(a / "per_prompt.csv")
    for row in rows[:3]:
        row["text_sha256"] = "another"
    b = write_run(tmp_path / "b", rows=rows, **half)
    _, (pair,) = run_compare(tmp_path / "one", [a, b], monkeypatch)
    assert pair["pairing"] == "paired"
    assert float(pair["differing_texts"]) == pytest.approx(3 / 9)
    assert "33.3%" in capfd.readouterr().out

    c = write_run(tmp_path / "c", **SAMPLED)
    d = write_run(tmp_path / "d", rows=rows, **SAMPLED)
    _, (pair,) = run_compare(tmp_path / "two", [c, d], monkeypatch)
    assert pair["pairing"] == "unpaired"
    assert "unpaired" in capfd.readouterr().out


def test_pairs_are_compared_where_others_are_refused(tmp_path, monkeypatch, capfd):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", gain=0.3, propose__num_draft_tokens=4)
    c = write_run(tmp_path / "c", ids=range(20, 29))
    code, pairs = run_compare(tmp_path / "out", [a, b, c], monkeypatch)
    assert code == 0
    assert [pair["pairing"] for pair in pairs] == ["paired", "refused", "refused"]
    assert pairs[1]["difference"] == pairs[1]["p_holm"] == ""
    assert "prompt_id" in pairs[1]["reason"]
    assert pairs[0]["p"] == pairs[0]["p_holm"]  # the only one that counts
    assert "a and c are not compared: prompt_id" in capfd.readouterr().out
    assert "a and c are not compared" in (tmp_path / "out" / "compare.html").read_text()


def test_each_refusal_is_one_short_line(tmp_path, monkeypatch, capfd):
    """Runs with names as long as a sweep's jobs have; the page tells the reasons in full."""
    stem = "propose-autoregressive_num_draft_tokens-4_temperature-0.7_top_p-0.95_max_tokens-128"
    first = write_run(tmp_path / f"{stem}_aaaaaa")
    same = write_run(tmp_path / f"{stem}_bbbbbb")
    other = {"data__path": f"{'long/' * 9}q.jsonl", "data__system_prompt": "You know. " * 9}
    data = write_run(tmp_path / f"{stem}_cccccc", ids=range(4), data__num_prompts=4, **other)
    texts = write_run(tmp_path / f"{stem}_dddddd", texts="other")
    hot = write_run(tmp_path / "hot", sampling__temperature=0.7, sampling__max_tokens=9)
    code, _ = run_compare(tmp_path / "out", [first, same, data, texts, hot], monkeypatch)
    assert code == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if "are not compared" in line]
    assert max(map(len, lines)) <= 150
    more = [re.search(r" \(and so for (\d+) more\)$", line) for line in lines]
    assert sum(1 + (int(found[1]) if found else 0) for found in more) == 9
    lines = [
        line[: found.start()] if found else line for line, found in zip(lines, more, strict=True)
    ]
    assert len(lines) == 4
    told = dict(line.split(" are not compared: ") for line in lines)
    names = next(iter(told))
    assert names == "data.path=p...mperature=0 and data.path=q...mperature=0"
    reasons = list(told.values())
    assert re.match(r"data\.path is p\.jsonl and long[/l]*\.\.\.", reasons[0])
    assert reasons[0].endswith("/q.jsonl, and 2 more")
    assert reasons[1].startswith("text_sha256: ")
    assert reasons[2] == "sampling.temperature is 0.0 and 0.7, and 1 more"
    page = (tmp_path / "out" / "compare.html").read_text()
    assert (
        "data.num_prompts is null in data.path=p.jsonl, temperature=0 and 4 in data.path=q" in page
    )


def test_intervals_and_p_values_of_many_runs(tmp_path, monkeypatch):
    paths = [
        write_run(
            tmp_path / f"r{n}", seed=n, gain=n / 10, ids=range(30), propose__num_draft_tokens=n
        )
        for n in (1, 2, 3, 4)
    ]
    code, pairs = run_compare(tmp_path / "out", paths, monkeypatch)
    assert code == 0
    assert len(pairs) == 6
    sums = []
    for path in paths:
        rows = sorted(rows_of(path / "per_prompt.csv"), key=lambda row: row["prompt_id"])
        sums.append(([29.0] * 30, [float(row["rounds"]) for row in rows]))
    p_values = []
    for pair, (i, j) in zip(pairs, itertools.combinations(range(4), 2), strict=True):
        expected = metrics.paired_difference(sums[i], sums[j])
        told = [float(pair[k]) for k in ("difference", "ci95_low", "ci95_high")]
        assert told == pytest.approx(list(expected))
        assert float(pair["p"]) == swap_p_value(sums[i], sums[j])
        p_values.append(float(pair["p"]))
    assert [float(pair["p_holm"]) for pair in pairs] == holm(p_values)
    assert pairs[0]["speed_ratio"] == "1.0"


def test_speeds_of_two_machines_have_no_ratio(tmp_path, monkeypatch):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", summary={"device_name": "cpu (y)"})
    _, (pair,) = run_compare(tmp_path / "out", [a, b], monkeypatch)
    assert pair["speed_ratio"] == ""
    assert pair["tokens_per_second_b"] == "50.0"


def test_replayed_texts_count_their_expected_rounds(tmp_path, monkeypatch):
    a = write_run(tmp_path / "a")
    rows = rows_of(a / "per_prompt.csv")
    for row in rows:
        row["expected_rounds"], row["rounds"] = float(row["rounds"]) * 0.8, ""
    b = write_run(tmp_path / "b", rows=rows)
    _, (pair,) = run_compare(tmp_path / "out", [b, a], monkeypatch)
    assert float(pair["length_a"]) == pytest.approx(float(pair["length_b"]) / 0.8)


def test_turns_and_samples_of_a_prompt_are_one_unit(tmp_path, monkeypatch):
    a = write_run(tmp_path / "a", seed=1)
    b = write_run(tmp_path / "b", seed=2, gain=0.2)
    _, (once,) = run_compare(tmp_path / "one", [a, b], monkeypatch)
    for name in "ab":
        rows = rows_of(tmp_path / name / "per_prompt.csv")
        copies = [{**row, "turn": t, "sample": s} for row in rows for t in (0, 1) for s in (0, 1)]
        write_run(tmp_path / f"{name}4", rows=copies)
    _, (four,) = run_compare(tmp_path / "two", [tmp_path / "a4", tmp_path / "b4"], monkeypatch)
    same = ("difference", "ci95_low", "ci95_high", "p", "num_prompts")
    assert [float(once[k]) for k in same] == pytest.approx([float(four[k]) for k in same])


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ("{propose.num_draft_tokens:4}", "bc"),
        ("{propose:{num_draft_tokens:4}}", "bc"),
        ("{propose.num_draft_tokens:[2,4]}", "abc"),
        ("{propose:ngram,seed:0}", "abc"),
        ("{sampling.top_k:null}", "abc"),
        ("{data.path:x/y.jsonl}", "ac"),
    ],
)
def test_filters_keep_runs_by_their_settings(wanted, kept, tmp_path, monkeypatch):
    write_run(tmp_path / "a", data__path="x/y.jsonl")
    write_run(tmp_path / "b", propose__num_draft_tokens=4)
    write_run(tmp_path / "c", propose__num_draft_tokens=4, data__path="x/y.jsonl")
    code, pairs = run_compare(tmp_path / "out", [tmp_path / "*"], monkeypatch, f"filter={wanted}")
    assert code == 0
    assert {pair[side] for pair in pairs for side in "ab"} == set(kept)


BAD = {
    "nothing there": ("runs=[{0}/none]", "none names no finished run"),
    "no match": ("runs={0}/z*", "z* names no finished run"),
    "one run": ("runs={0}/a", "the only one"),
    "no run": ("runs={0}/empty", "holds no per_prompt.csv"),
    "a failed run": ("runs=[{0}/a,{0}/failed]", "is failed, not done: out of paper"),
    "a table without a column": ("runs=[{0}/a,{0}/torn]", "no column 'num_tokens'"),
    "a misspelled filter": (
        "runs=[{0}/a,{0}/b] filter={{propose.num_draft_token:4}}",
        "did you mean 'propose.num_draft_tokens'",
    ),
    "a filter that keeps none": ("runs=[{0}/a,{0}/b] filter={{seed:7}}", "there is 0"),
    "a filter of one word": ("runs=[{0}/a,{0}/b] filter=ngram", "filter=ngram must map"),
    "no paths": ("runs=[]", "runs=[] must be a path"),
    "no runs": ("", "runs has no value"),
    "a misspelled key": ("runs={0}/a +filtr=1", "did you mean 'filter'"),
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    write_run(folder / "a")
    write_run(folder / "b", propose__num_draft_tokens=4)
    (folder / "empty").mkdir()
    write_status(write_run(folder / "failed"), "failed", "out of paper")
    write_run(
        folder / "torn",
        rows=[{"prompt_id": "q0", "turn": 0, "category": "", "sample": 0, "text_sha256": ""}],
    )
    return folder


def write_status(folder, status, error=None, num=0):
    told = {"status": status, "config_hash": "", "error": error, "num": num}
    (folder / "status.json").write_text(json.dumps(told))


@pytest.mark.parametrize(("argv", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_line(argv, named, shelf, tmp_path, monkeypatch, capfd):
    words = [*argv.format(shelf).split(), f"hydra.run.dir={tmp_path}/out"]
    assert call(compare.main, words, monkeypatch) == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert named in err


def test_jobs_that_are_not_done_are_left_out(tmp_path, monkeypatch, capfd):
    for num, (name, status) in enumerate(
        (("z", "done"), ("y", "running"), ("x", "failed"), ("w", "done"))
    ):
        write_status(write_run(tmp_path / "sweep" / name), status, None, num)
    (tmp_path / "sweep" / "x" / "per_prompt.csv").unlink()
    code, (pair,) = run_compare(tmp_path / "out", [tmp_path / "sweep"], monkeypatch)
    assert code == 0
    assert (pair["a"], pair["b"]) == ("z", "w")  # in the sweep's order
    out = capfd.readouterr().out
    assert out.count("left out") == 2
    assert "running" in out


def test_names_are_as_short_as_they_can_be(tmp_path):
    paths = [tmp_path / "x" / "0", tmp_path / "y" / "0", tmp_path / "y" / "1", tmp_path / "y" / "1"]
    assert short_paths(paths) == ["x/0", "y/0", "1", "1 (2)"]
    assert short_names(["a.k", "b.k", "c.d.e"]) == ["a.k", "b.k", "e"]


def run_of(name, path="nowhere", choices=(), **config):
    return Run(Path(path), name, config, {"choices": dict(choices)}, ())


HASHED = ("num_draft_tokens-2_9c103f", "num_draft_tokens-3_aa11bb", "seed-0_145d8a", "q_0c173f")


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        # a setting that follows another of its name is that one
        (
            [{"seed": s, "sampling": {"seed": s}} for s in (0, 1)],
            ["seed=0", "seed=1"],
        ),
        (
            [{"seed": s, "sampling": {"seed": 7 - s}} for s in (0, 1)],
            ["seed=0, sampling.seed=7", "seed=1, sampling.seed=6"],
        ),
        # a keyword of some runs' function
        (
            [{"verify": {"_target_": "own.mine", "threshold": t}} for t in (0.1, 0.3)]
            + [{"verify": {"_target_": "a.greedy"}}],
            ["verify=mine, threshold=0.1", "verify=mine, threshold=0.3", "verify=greedy"],
        ),
        ([{"a": 1}, {"a": 1}, {"a": 2}], ["a=1", "a=1 (2)", "a=2"]),
        (
            [{"draft": {"path": f"{p}/head"}, "target": {"path": p}} for p in ("x/a", "x/b")],
            ["draft.path=a/head, target.path=a", "draft.path=b/head, target.path=b"],
        ),
        (
            [{"propose": {"num_draft_tokens": k}, "dtype": d} for k, d in ((2, "x"), (3.0, None))],
            ["K=2, dtype=x", "K=3, dtype=null"],
        ),
    ],
)
def test_labels_tell_what_differs(settings, labels):
    runs = [run_of(name, **config) for name, config in zip(HASHED, settings, strict=False)]
    naming = name_runs(runs)
    assert naming.labels == labels
    assert not naming.unnamed


def test_a_choice_stands_for_what_it_decides(tmp_path):
    def run(model, num_draft_tokens, head=None, at=tmp_path / "none"):
        draft = {"path": head or f"pretrained/{model}/head"}
        config = {"target": {"path": f"pretrained/{model}"}, "draft": draft}
        config["propose"] = {"_target_": f"x.{model}_steps", "num_draft_tokens": num_draft_tokens}
        choices = {"model": model, "draft": model}
        return run_of(HASHED[num_draft_tokens], at, choices, **config)

    naming = name_runs([run(model, k) for model in ("llama", "qwen3") for k in (1, 2)])
    assert naming.labels == [f"model={m}, K={k}" for m in ("llama", "qwen3") for k in (1, 2)]
    own = write_run(tmp_path / "own")
    (own / "status.json").write_text(
        json.dumps({"config_hash": "", "overrides": ["draft.path=mine/head"]})
    )
    naming = name_runs([run("llama", 1), run("qwen3", 1, "mine/head", own)])
    assert naming.labels == [
        "model=llama, draft.path=llama/head",
        "model=qwen3, draft.path=mine/head",
    ]


def test_long_labels_leave_out_what_tells_no_runs_apart():
    words = [letter * 14 for letter in "abcd"]
    settings = [{**dict.fromkeys(words, 1), word: 5} for word in words]
    names = [f"{'job' * 9}{index}" for index in range(5)]

    def labels_of(settings, names):
        pairs = zip(names, settings, strict=False)
        return name_runs([run_of(name, **config) for name, config in pairs])

    naming = labels_of([*settings, dict.fromkeys(words, 1)], names)
    assert naming.labels == [*(f"{w}=5" for w in words), ", ".join(f"{w}=1" for w in words)]
    numbered = [{**config, "k": k} for k, config in enumerate(settings)]
    naming = labels_of(numbered, names)
    assert naming.labels[0] == f"{words[0]}=5, {words[1]}=1, {words[2]}=1"
    assert naming.unnamed == [words[3], "k"]
    assert labels_of(settings, list("xyzuv")).labels == list("xyzu")


def test_swapping_prompts_gives_the_exact_p():
    a = ([9.0, 7, 8, 6, 9], [4.0, 4, 5, 3, 5])
    b = ([9.0, 7, 8, 6, 9], [5.0, 4, 5, 4, 4])
    differences = []
    for swaps in itertools.product((0, 1), repeat=5):
        sides = [list(zip(a[i], b[i], strict=True)) for i in (0, 1)]
        first = [sum(p[x] for p, x in zip(side, swaps, strict=True)) for side in sides]
        second = [sum(p[1 - x] for p, x in zip(side, swaps, strict=True)) for side in sides]
        differences.append(first[0] / first[1] - second[0] / second[1])
    observed = abs(differences[0])
    share = np.mean([abs(d) >= observed - 1e-12 for d in differences])
    assert swap_p_value(a, b) == pytest.approx(share)
    assert swap_p_value(a, a) == 1
    assert swap_p_value(([1.0], [0.0]), ([1.0], [1.0])) is None


def test_swapping_keeps_its_level_and_finds_what_is_there():
    rng = np.random.default_rng(5)
    small, found = 0, 0
    for trial in range(60):
        rounds = rng.integers(20, 60, size=24)
        same = [(rng.binomial(rounds, 0.5) + rounds, rounds) for _ in range(2)]
        small += swap_p_value(*same, seed=trial) <= 0.1
        better = (rng.binomial(rounds, 0.65) + rounds, rounds)
        found += swap_p_value(better, same[0], seed=trial) <= 0.01
    assert small <= 13  # of 60; 10% give 6 and a standard error of 2.3
    assert found >= 57


def test_holm():
    # sorted .005 .01 .03 .04 times 4, 3, 2, 1, and never falling
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == [0.03, 0.06, None, 0.06, 0.02]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
