"""Prompt sets: formats, selection, errors and rendering."""

import gzip
import json
import os
import random
import warnings
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from specdec import prompts
from specdec.errors import DataError
from specdec.prompts import Prompt, PromptSet

CATEGORIES = [
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
]
NAMED_SETS = ["mt_bench", "spec_bench", "humaneval", "gsm8k"]
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<system>default{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
REFUSING_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ messages[0].content }}"
)


def write_rows(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def fastchat_rows(sizes: dict[str, int]) -> list[dict]:
    names = [name for name, size in sizes.items() for _ in range(size)]
    return [
        {"question_id": i, "category": name, "turns": [f"first {i}", f"second {i}"]}
        for i, name in enumerate(names)
    ]


def texts(prompt_set: PromptSet) -> list[str]:
    return [turn for prompt in prompt_set.prompts for turn in prompt.turns]


def character_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, so that ids decode to exactly what was rendered."""
    vocab = {chr(code): code for code in range(32, 127)} | {"\n": 10}
    model = Tokenizer(WordLevel(vocab, unk_token="?"))
    model.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?")
    tokenizer.chat_template = chat_template
    return tokenizer


def rendered(prompt_set: PromptSet, chat_template: str | None, history=()) -> str:
    tokenizer = character_tokenizer(chat_template)
    ids = prompts.render(prompt_set, prompt_set.prompts[0], tokenizer, history)
    assert all(type(i) is int for i in ids)
    return "".join(map(chr, ids))


# The sets that come with the package.


@pytest.mark.parametrize(("load", "each"), [(prompts.builtin, 10), (prompts.dev, 8)])
def test_own_sets_cover_the_categories_with_two_turns(load, each):
    loaded = load(turns="all")
    assert Counter(p.category for p in loaded.prompts) == dict.fromkeys(CATEGORIES, each)
    assert all(len(p.turns) == 2 for p in loaded.prompts)
    assert len(set(texts(loaded))) == len(texts(loaded))


def test_own_sets_and_training_seeds_have_no_id_and_no_text_in_common():
    seeds = prompts.jsonl(str(Path(prompts.__file__).with_name("train_seeds.jsonl")), turns="all")
    together = [*prompts.builtin().prompts, *prompts.dev().prompts, *seeds.prompts]
    assert len(seeds.prompts) >= 400
    assert {p.category for p in seeds.prompts} >= set(CATEGORIES)
    assert len({p.prompt_id for p in together}) == len(together)
    assert len({p.turns[0] for p in together}) == len(together)


def test_builtin_refuses_a_path():
    with pytest.raises(DataError, match=r"data=builtin .* x\.jsonl with data=jsonl"):
        prompts.builtin("x.jsonl")


# Formats.


def test_generic_rows(tmp_path):
    path = write_rows(
        tmp_path / "mine.jsonl",
        [
            {"turns": ["one", "two"], "question_id": 7, "category": "a", "reference": None},
            {"prompt": "three", "prompt_id": "x"},
            {"question": "four", "task_id": "T/0"},
            {"prompt": "five"},
        ],
    )
    loaded = prompts.jsonl(path, turns="all")
    assert loaded.prompts == (
        Prompt("7", "a", ("one", "two")),
        Prompt("x", "jsonl", ("three",)),
        Prompt("T/0", "jsonl", ("four",)),
        Prompt("line-4", "jsonl", ("five",)),
    )
    assert (loaded.name, loaded.turns) == ("jsonl", "all")
    assert [p.turns for p in prompts.jsonl(path).prompts] == [
        ("one",),
        ("three",),
        ("four",),
        ("five",),
    ]


@pytest.mark.parametrize("name", ["mt_bench", "spec_bench"])
def test_fastchat_rows(tmp_path, name):
    path = write_rows(tmp_path / "question.jsonl", fastchat_rows({"qa": 1, "math": 1}))
    loaded = getattr(prompts, name)(path, turns="all", system_prompt="Be brief.")
    assert loaded.prompts == (
        Prompt("0", "qa", ("first 0", "second 0")),
        Prompt("1", "math", ("first 1", "second 1")),
    )
    assert (loaded.name, loaded.system_prompt) == (name, "Be brief.")


def test_humaneval_asks_for_the_function_and_reads_gzip(tmp_path):
    code = "def double(x):\n    '''{twice} x'''\n"
    row = {"task_id": "HumanEval/0", "prompt": code, "entry_point": "double"}
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    (prompt,) = prompts.humaneval(str(path)).prompts
    assert (prompt.prompt_id, prompt.category) == ("HumanEval/0", "coding")
    assert prompt.turns[0].startswith("Complete the following Python function.")
    assert f"```python\n{code}```" in prompt.turns[0]


def test_gsm8k_keeps_the_question(tmp_path):
    path = write_rows(tmp_path / "test.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    assert prompts.gsm8k(path).prompts == (Prompt("gsm8k-1", "math", ("1 + 1?",)),)


# Selection.


def test_choice_is_proportional_nested_and_in_file_order(tmp_path):
    rows = fastchat_rows({"large": 40, "middle": 20, "small": 10})
    random.Random(0).shuffle(rows)
    path = write_rows(tmp_path / "question.jsonl", rows)
    order = [str(row["question_id"]) for row in rows]
    previous: set[str] = set()
    for num in range(1, 71):
        chosen = prompts.mt_bench(path, num_prompts=num).prompts
        ids = [p.prompt_id for p in chosen]
        assert len(ids) == num
        assert ids == sorted(ids, key=order.index)
        assert previous < set(ids)
        previous = set(ids)
        counts = Counter(p.category for p in chosen)
        for name, size in {"large": 40, "middle": 20, "small": 10}.items():
            assert abs(counts[name] - num * size / 70) < 1
    assert prompts.mt_bench(path).prompts == prompts.mt_bench(path, num_prompts=70).prompts


def test_equal_categories_give_equally(tmp_path):
    chosen = prompts.builtin(num_prompts=16).prompts
    assert Counter(p.category for p in chosen) == dict.fromkeys(CATEGORIES, 2)
    assert chosen == prompts.builtin(num_prompts=16).prompts


@pytest.mark.parametrize("num", [0, -1, True, 2.5, "8"])
def test_a_number_of_prompts_that_makes_no_sense_is_refused(num):
    with pytest.raises(DataError, match=r"data\.num_prompts=.* must be a positive integer or null"):
        prompts.builtin(num_prompts=num)


def test_more_prompts_than_there_are():
    with pytest.raises(DataError, match=r"data\.num_prompts=81 exceeds the 80 prompts"):
        prompts.builtin(num_prompts=81)


# Errors.


@pytest.mark.parametrize("name", [*NAMED_SETS, "jsonl"])
@pytest.mark.parametrize("path", [None, ""])
def test_a_named_set_needs_a_path(name, path):
    with pytest.raises(DataError, match=rf"^data={name} needs data\.path \(.+\)$"):
        getattr(prompts, name)(path)


def test_the_message_for_mt_bench():
    with pytest.raises(DataError) as error:
        prompts.mt_bench()
    assert str(error.value) == (
        "data=mt_bench needs data.path (a question.jsonl in FastChat's format)"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"is empty; it must hold at least one prompt"),
        ("\n \n", r"is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', r"line 2 is not valid JSON: .+ at column"),
        ('\n["a"]\n', r"line 2 is not a JSON object but list"),
        ("[" * 100_000, r"line 1 is not JSON that can be read"),
        ('{"prompt": "a", "n": %s}' % ("9" * 5000), r"line 1 is not JSON that can be read"),
        ('{"prompt": "\\ud800"}', r"line 1: '\\ud800' is not valid Unicode"),
        ('{"prompt": "a", "category": "\\udfff"}', r"line 1: '\\udfff' is not valid Unicode"),
        ('{"text": "a"}', r"line 1 has no field turns, prompt or question"),
        ('{"turns": []}', r"line 1: turns must be a list of at least one text"),
        ('{"turns": ["a", 3]}', r"line 1: a turn must be a text that is not blank, not 3"),
        ('{"prompt": "  "}', r"line 1: a turn must be a text"),
        ('{"prompt": "a", "category": 3}', r"line 1: category 3 must be a text"),
        ('{"prompt": "a", "prompt_id": [1]}', r"line 1: the id \[1\] must be"),
        (
            '{"prompt": "a", "prompt_id": 1}\n\n{"prompt": "b", "prompt_id": "1"}',
            r"lines 1 and 3 share the id '1'",
        ),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_place(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as error:
        prompts.jsonl(str(path))
    assert "bad.jsonl" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("mt_bench", {"category": "a", "turns": ["b"]}, "question_id"),
        ("mt_bench", {"question_id": 1, "turns": ["b"]}, "category"),
        ("spec_bench", {"question_id": 1, "category": "a"}, "turns"),
        ("humaneval", {"prompt": "def f(): ..."}, "task_id"),
        ("humaneval", {"task_id": "x"}, "prompt"),
        ("gsm8k", {"answer": "4"}, "question"),
    ],
)
def test_a_missing_field_is_named(tmp_path, name, row, field):
    path = write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=rf"line 1 has no field {field}$"):
        getattr(prompts, name)(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        prompts.jsonl(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match=r"is a folder, not a file"):
        prompts.jsonl(str(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl is not a text file"):
        prompts.jsonl(str(tmp_path / "latin.jsonl"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}')[:-6])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz is not a text file"):
        prompts.jsonl(str(tmp_path / "cut.jsonl.gz"))


def test_unknown_turns():
    with pytest.raises(DataError, match=r"data\.turns='both' is unknown; choose one of first, all"):
        prompts.builtin(turns="both")


# Rendering.

ONE = (Prompt("1", "chat", ("Hi", "Bye")),)


def test_the_template_decides_about_the_system_message():
    assert rendered(PromptSet("t", ONE), TEMPLATE) == "<system>default<user>Hi<assistant>"
    own = PromptSet("t", ONE, system_prompt="Be kind")
    assert rendered(own, TEMPLATE) == "<system>Be kind<user>Hi<assistant>"
    empty = PromptSet("t", ONE, system_prompt="")
    assert rendered(empty, TEMPLATE) == "<system><user>Hi<assistant>"


def test_a_later_turn_sees_the_answers():
    text = rendered(PromptSet("t", ONE), TEMPLATE, history=["Hello"])
    assert text == "<system>default<user>Hi<assistant>Hello<user>Bye<assistant>"
    with pytest.raises(ValueError, match="2 answers leave no turn of prompt '1', which has 2"):
        rendered(PromptSet("t", ONE), TEMPLATE, history=["Hello", "Ciao"])


def test_a_template_given_as_text_or_file_replaces_the_models(tmp_path):
    (tmp_path / "mine.jinja").write_text("[{{ messages[0].content }}]")
    for given in ("[{{ messages[0].content }}]", str(tmp_path / "mine.jinja")):
        mine = prompts.builtin(chat_template=given, num_prompts=1)
        assert rendered(mine, TEMPLATE) == f"[{mine.prompts[0].turns[0]}]"
    with pytest.raises(DataError, match=r"'gone\.jinja' is neither a file nor a Jinja template"):
        prompts.builtin(chat_template="gone.jinja")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"binary\.jinja' is not a text file"):
        prompts.builtin(chat_template=str(tmp_path / "binary.jinja"))


def test_a_template_that_drops_or_refuses_the_system_prompt_is_an_error():
    own = PromptSet("t", ONE, system_prompt="Be kind")
    with pytest.raises(DataError, match=r"data\.system_prompt='Be kind' is left out"):
        rendered(own, NO_SYSTEM_TEMPLATE)
    with pytest.raises(DataError, match=r"the chat template cannot render '1': no system role"):
        rendered(own, REFUSING_TEMPLATE)
    with pytest.raises(DataError, match=r"the chat template cannot render '1'"):
        rendered(PromptSet("t", ONE, chat_template="{% for %}"), TEMPLATE)


def test_without_any_template_the_text_is_plain_and_a_warning_says_so():
    own = PromptSet("t", ONE, system_prompt="Be kind")
    with pytest.warns(UserWarning, match="no chat template") as caught:
        text = rendered(own, None, history=["Hello"])
    assert text == "Be kind\n\nHi\n\nHello\n\nBye"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rendered(PromptSet("t", ONE, chat_template=TEMPLATE), None)


# Real files: SPECDEC_DATA is a folder that holds those below.

FILES = {
    "mt_bench": ("mt_bench/question.jsonl", 80),
    "spec_bench": ("spec_bench/question.jsonl", 480),
    "humaneval": ("human_eval/HumanEval.jsonl", 164),
    "gsm8k": ("gsm8k/test.jsonl", 1319),
}


@pytest.fixture
def data_folder() -> Path:
    if not os.environ.get("SPECDEC_DATA"):
        pytest.skip("SPECDEC_DATA names no folder of published prompt sets")
    return Path(os.environ["SPECDEC_DATA"])


@pytest.mark.parametrize("name", NAMED_SETS)
def test_published_files_load(data_folder, name):
    file, size = FILES[name]
    loaded = getattr(prompts, name)(str(data_folder / file), turns="all")
    assert len(loaded.prompts) == size
