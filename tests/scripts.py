"""The experiments' scripts called in this process, on a tiny pair of models, for tests."""

import csv
import json
import sys

import tiny
import tiny_chat

from specdec.models.load import load_target

PROMPTS = [
    {
        "question_id": f"q{i}",
        "category": ("math", "coding")[i % 2],
        "turns": [f"w{7 + i} w30", "w9"],
    }
    for i in range(6)
]


def tiny_job(folder):
    """Overrides that run a tiny random pair over six prompts in fp32; their files go to folder."""
    target = tiny_chat.write_chat_model(folder / "target")
    draft = tiny.write_draft(folder / "draft", load_target(target))
    prompts = write_prompts(folder / "prompts.jsonl", PROMPTS)
    return [
        *(f"target.path={target}", f"draft.path={draft}", "data=jsonl", f"data.path={prompts}"),
        *("draft.logits_from=shared", "draft.num_draft_rows=null"),
        *("dtype=float32", "device=cpu", "num_threads=1", "sampling.max_tokens=12"),
    ]


def write_prompts(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(main, argv, monkeypatch):
    """Exit status of a script's main(), in this process."""
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, argv)])
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def status_of(folder):
    return json.loads((folder / "status.json").read_text())


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def jobs_of(sweep):
    """The folders of a sweep's jobs in their order."""
    return [sweep / row["job"] for row in rows_of(sweep / "sweep.csv")]
