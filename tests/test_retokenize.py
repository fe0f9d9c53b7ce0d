"""The small tokenizer, and text that changes its vocabulary."""

import json

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from small_text import small_texts

from specdec.config import register_schemas
from specdec.errors import DataError
from specdec.experiments import retokenize as script
from specdec.models.tokenizer import eos_token_ids, load_tokenizer
from specdec.prompts import Prompt, PromptSet, render, simple, simple_prompts
from specdec.prompts.simple import is_held_out
from specdec.training.data import load_dataset, response, write_dataset
from specdec.training.generation import chat_frame, encode
from specdec.training.tokenizer import (
    SPECIAL,
    bytes_of_ids,
    load_saved,
    save_tokenizer,
    train_tokenizer,
)

STRANGE = [
    "Ünïcode 日本語 🎈 ok",
    "tabs\tand\n\nlines  two  spaces ",
    "12345 3.14",
    "<b>&amp;</b>",
    "\x00",
]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [part for t in small_texts(200) for part in (t.prompt, t.answer)]
    return train_tokenizer(texts, 400)


def test_any_text_comes_back(tokenizer, tmp_path):
    assert tokenizer.get_vocab_size() == 400
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3]
    save_tokenizer(tmp_path, tokenizer)
    loaded = load_tokenizer(tmp_path)
    sizes = bytes_of_ids(load_saved(tmp_path))
    for text in [*STRANGE, *(t.answer for t in small_texts(20, seed=5))]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == text
        assert sum(sizes[i] for i in ids) == len(text.encode())
    assert eos_token_ids(tmp_path) == (0,)
    digits = tokenizer.encode("12345", add_special_tokens=False).ids
    assert len(digits) == 5


def test_the_template_is_what_the_data_holds(tokenizer, tmp_path):
    save_tokenizer(tmp_path, tokenizer)
    (text, *_) = small_texts(1)
    (sample,) = script.encode([text], tokenizer)
    first = list(sample.supervised).index(True)
    prompts = PromptSet("s", (Prompt("p", "c", (text.prompt,)),))
    rendered = render(prompts, prompts.prompts[0], load_tokenizer(tmp_path), ())
    assert list(sample.token_ids[:first]) == rendered
    assert sample.token_ids[-1] == 0
    assert tokenizer.decode(list(sample.token_ids[first:-1])) == text.answer


def test_a_vocabulary_that_does_not_fit_is_refused():
    with pytest.raises(DataError, match="at least 260"):
        train_tokenizer(["text"], 100)
    with pytest.raises(DataError, match=r"gives 2\d\d ids"):
        train_tokenizer(["aab"], 400)


def test_a_model_s_text_keeps_its_words(smollm2_path, tmp_path):
    writer = load_tokenizer(smollm2_path)
    frame, (end,) = chat_frame(writer), eos_token_ids(smollm2_path)
    texts = [t._replace(ended=i % 3 > 0) for i, t in enumerate(small_texts(150))]
    texts[4] = texts[4]._replace(answer=STRANGE[0])
    prompts = encode(writer, [frame.before + t.prompt + frame.after for t in texts])
    answers = encode(writer, [t.answer for t in texts])
    samples = [
        response(p, [*a, *[end] * t.ended], 0.5)
        for p, a, t in zip(prompts, answers, texts, strict=True)
    ]
    write_dataset(tmp_path / "text", samples, vocab_size=49152, meta={})
    register_schemas()
    with initialize_config_module("specdec.conf", version_base="1.3"):
        overrides = [
            f"source.paths=[{tmp_path / 'text'}]", f"source.tokenizer={smollm2_path}",
            f"path={tmp_path / 'small'}", "vocab_size=330", "heldout_share=0.2",
        ]  # fmt: skip
        cfg = compose("retokenize", overrides)
    script.retokenize(cfg, tmp_path)

    small = load_saved(tmp_path / "small" / "tokenizer")
    found = set()
    for side in ("train", "heldout"):
        data = load_dataset(tmp_path / "small" / side, vocab_size=330)
        for start, length, count in zip(
            data.starts, data.lengths, data.num_supervised, strict=True
        ):
            ids = np.array(data.tokens[0][start : start + length]).tolist()
            asked = small.decode(ids[: length - count])
            answer = ids[length - count :]
            found.add((side, asked, small.decode(answer), answer[-1] == 0))
    sides = ("train", "heldout")
    expected = {(sides[is_held_out(t.prompt, 0.2)], t.prompt, t.answer, t.ended) for t in texts}
    assert found == expected
    assert {side for side, *_ in expected} == set(sides)
    words = set((tmp_path / "small" / "words.txt").read_text().split())
    trained = [t for t in texts if not is_held_out(t.prompt, 0.2)]
    assert words == set(script.count_words(trained))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["train"]["num_samples"] == len(trained)
    assert summary["train"]["answer_bytes"] == sum(len(t.answer.encode()) for t in trained)
    with pytest.raises(DataError, match="exists already"):
        script.retokenize(cfg, tmp_path)


def test_simple_prompts_are_held_out_by_their_text():
    rows = simple_prompts(3000, 7)
    assert len({row["turns"][0] for row in rows}) == 3000
    assert rows == simple_prompts(3000, 7)
    assert 0.2 < sum(row["category"] == "question" for row in rows) / 3000 < 0.45
    held_out = {row["turns"][0] for row in rows if is_held_out(row["turns"][0])}
    assert 30 < len(held_out) < 95
    assert all(is_held_out(text, 0.5) for text in held_out)
    chosen = simple(num_prompts=20).prompts
    assert all(is_held_out(prompt.turns[0]) for prompt in chosen)
    assert set(chosen) <= set(simple().prompts)
    assert not any("{" in row["turns"][0] for row in rows)
