"""Prompt sets: one plain function a set, all returning a `PromptSet`.

    prompts = mt_bench("question.jsonl", num_prompts=16, turns="all")
    token_ids = render(prompts, prompts.prompts[0], tokenizer, history=())

All loaders share four keywords: `num_prompts` (stratified by category and the same in every run;
None keeps all), `turns` (first or all), `system_prompt` and `chat_template` (None: the model's
own). They raise `DataError`, one line that names the file and the line.
"""

from importlib.resources import files
from typing import Any

from specdec.errors import DataError
from specdec.prompts.decontaminate import drop_contaminated, shared_ngrams
from specdec.prompts.records import Prompt, PromptSet, prompt_set, read_rows, stratified
from specdec.prompts.render import render
from specdec.prompts.simple import simple, simple_prompts
from specdec.prompts.training import training_prompts

__all__ = [
    "Prompt",
    "PromptSet",
    "builtin",
    "dev",
    "drop_contaminated",
    "gsm8k",
    "humaneval",
    "jsonl",
    "mt_bench",
    "read_rows",
    "render",
    "shared_ngrams",
    "simple",
    "simple_prompts",
    "spec_bench",
    "stratified",
    "training_prompts",
]

ID_FIELDS = ("question_id", "prompt_id", "task_id")
HUMANEVAL_INSTRUCTION = (
    "Complete the following Python function. "
    "Answer with the whole function in one code block.\n\n```python\n{code}\n```"
)


def builtin(
    path: str | None = None,
    *,
    num_prompts: int | None = None,
    turns: str = "first",
    system_prompt: str | None = None,
    chat_template: str | None = None,
) -> PromptSet:
    """80 prompts of two turns, ten in each of the eight categories of MT-bench."""
    path = _own_path("builtin", path)
    return prompt_set("builtin", path, _fastchat, num_prompts, turns, system_prompt, chat_template)


def dev(
    path: str | None = None,
    *,
    num_prompts: int | None = None,
    turns: str = "first",
    system_prompt: str | None = None,
    chat_template: str | None = None,
) -> PromptSet:
    """64 prompts of two turns, eight a category, for choosing checkpoints; none is in `builtin`."""
    path = _own_path("dev", path)
    return prompt_set("dev", path, _fastchat, num_prompts, turns, system_prompt, chat_template)


def jsonl(
    path: str | None = None,
    *,
    num_prompts: int | None = None,
    turns: str = "first",
    system_prompt: str | None = None,
    chat_template: str | None = None,
) -> PromptSet:
    """Any file of JSON objects, one a line.

    A row holds `turns` (a list of texts), `prompt` or `question` (one text). Optional are an id
    (`question_id`, `prompt_id` or `task_id`; else `line-<number>`) and `category` (else `jsonl`).
    """
    path = _needs_path("jsonl", path, "a file with turns, prompt or question in each line")
    return prompt_set("jsonl", path, _generic, num_prompts, turns, system_prompt, chat_template)


def mt_bench(
    path: str | None = None,
    *,
    num_prompts: int | None = None,
    turns: str = "first",
    system_prompt: str | None = None,
    chat_template: str | None = None,
) -> PromptSet:
    """MT-bench (arXiv 2306.05685): question_id, category and turns in each row."""
    path = _needs_path("mt_bench", path, "a question.jsonl in FastChat's format")
    return prompt_set("mt_bench", path, _fastchat, num_prompts, turns, system_prompt, chat_template)


def spec_bench(
    path: str | None = None,
    *,
    num_prompts: int | None = None,
    turns: str = "first",
    system_prompt: str | None = None,
    chat_template: str | None = None,
) -> PromptSet:
    """Spec-Bench (arXiv 2401.07851), MT-bench and five other tasks, in the format of MT-bench."""
    path = _needs_path("spec_bench", path, "Spec-Bench's question.jsonl, in FastChat's format")
    return prompt_set(
        "spec_bench", path, _fastchat, num_prompts, turns, system_prompt, chat_template
    )


def humaneval(
    path: str | None = None,
    *,
    num_prompts: int | None = None,
    turns: str = "first",
    system_prompt: str | None = None,
    chat_template: str | None = None,
) -> PromptSet:
    """HumanEval (arXiv 2107.03374): a user turn that asks to complete a function."""
    path = _needs_path("humaneval", path, "HumanEval.jsonl or HumanEval.jsonl.gz")
    return prompt_set(
        "humaneval", path, _humaneval, num_prompts, turns, system_prompt, chat_template
    )


def gsm8k(
    path: str | None = None,
    *,
    num_prompts: int | None = None,
    turns: str = "first",
    system_prompt: str | None = None,
    chat_template: str | None = None,
) -> PromptSet:
    """GSM8K (arXiv 2110.14168): the bare question; rows carry no id, so ids are line numbers."""
    path = _needs_path("gsm8k", path, "GSM8K's test.jsonl, with question in each line")
    return prompt_set("gsm8k", path, _gsm8k, num_prompts, turns, system_prompt, chat_template)


def _own_path(name: str, path: str | None) -> str:
    """The set's file in the package; `path` is there because all sets share their keywords."""
    if path is not None:
        raise DataError(f"data={name} has its own file; read {path} with data=jsonl")
    return str(files("specdec.prompts") / f"{name}.jsonl")


def _needs_path(name: str, path: str | None, what: str) -> str:
    if not path:
        raise DataError(f"data={name} needs data.path ({what})")
    return str(path)


def _fastchat(row: dict[str, Any], line: int) -> Prompt:
    return Prompt(_id(row["question_id"]), _category(row["category"]), _turns(row["turns"]))


def _generic(row: dict[str, Any], line: int) -> Prompt:
    given = [row[field] for field in ID_FIELDS if row.get(field) is not None]
    texts = [row[field] for field in ("turns", "prompt", "question") if field in row]
    if not texts:
        raise KeyError("turns, prompt or question")
    prompt_id = _id(given[0]) if given else f"line-{line}"
    turns = texts[0] if isinstance(texts[0], list) else [texts[0]]
    return Prompt(prompt_id, _category(row.get("category", "jsonl")), _turns(turns))


def _humaneval(row: dict[str, Any], line: int) -> Prompt:
    (code,) = _turns([row["prompt"]])
    turn = HUMANEVAL_INSTRUCTION.format(code=code.rstrip())
    return Prompt(_id(row["task_id"]), "coding", (turn,))


def _gsm8k(row: dict[str, Any], line: int) -> Prompt:
    return Prompt(f"gsm8k-{line}", "math", _turns([row["question"]]))


def _id(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError(f"the id {value!r} must be a text or an integer")
    return str(value)


def _category(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"category {value!r} must be a text")
    return value


def _turns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"turns must be a list of at least one text, not {value!r:.60}")
    for turn in value:
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"a turn must be a text that is not blank, not {turn!r:.60}")
    return tuple(value)
