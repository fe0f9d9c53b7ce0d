"""Tokenizers from GGUF metadata and Hugging Face folders."""

import json

import pytest
import tiny
import tiny_chat

from specdec.errors import CheckpointError
from specdec.models.tokenizer import eos_token_ids, load_tokenizer, real_vocab_size

ODD_TEXTS = [
    "plain words",
    " leading and  double  spaces   ",
    "digits 1234567890, 3.14159 and 1,000,000",
    "tabs\tand\nnew\r\nlines\n\n\n",
    "naïve café — “quotes” …",
    "삼겹살 🙂🙂 é 👩‍👩‍👧‍👦",
    "你好，世界！ こんにちは",
    "مرحبا שלום Привет",
    "def f(x):\n    return x**2  # \\d+ {}[]<>\n",
    "a\u0301 \u200b zero width \ufeff bom",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_gguf_round_trip(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < 49152 for token in ids)


def test_gguf_tokens(tokenizer):
    """Digits one by one, a space with the word after it, special tokens whole."""
    split = tokenizer.convert_ids_to_tokens(tokenizer("Hello world 2024").input_ids)
    assert split == ["Hello", "Ġworld", "Ġ", "2", "0", "2", "4"]
    assert tokenizer("<|im_start|>user\n<|im_end|>").input_ids == [1, 4093, 198, 2]
    assert tokenizer.decode([1, 4093, 198, 2], skip_special_tokens=True) == "user\n"
    assert len(tokenizer) == 49152


def test_gguf_chat_template_and_special_ids(tokenizer, smollm2_path):
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert eos_token_ids(smollm2_path) == eos_token_ids(tokenizer) == (2,)


def test_folder_equals_gguf(tokenizer, smollm2_path, tmp_path):
    """The same tokenizer through tokenizer.json."""
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    for text in ODD_TEXTS:
        assert again(text).input_ids == tokenizer(text).input_ids
    assert again.chat_template == tokenizer.chat_template
    assert eos_token_ids(tmp_path) == (2,)
    assert real_vocab_size(tmp_path) == 49152
    assert real_vocab_size(smollm2_path) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": [2, 7], "config.json": 3}, (2, 7)),
        ({"generation_config.json": None, "config.json": 3}, (3,)),
        ({"config.json": [4]}, (4,)),
    ],
)
def test_declared_ends_of_a_folder(tmp_path, files, expected):
    for name, ids in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
    assert eos_token_ids(tmp_path) == expected


def test_a_folder_without_a_tokenizer(tmp_path):
    folder = tiny.write_target(tmp_path)
    tiny.one_line_error(lambda: load_tokenizer(folder), CheckpointError, "no readable tokenizer")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", '{"a": 1}', "tokenizer.json is not a tokenizer's file .KeyError"),
        ("tokenizer.json", '{"model": {"vocab": [1]}}', "is not a tokenizer's file .TypeError"),
        ("generation_config.json", "not json", "generation_config.json is not valid JSON"),
        ("generation_config.json", "[]", "generation_config.json is not a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id='x' must be an id"),
        ("generation_config.json", '{"eos_token_id": [2, null]}', "must be an id or a list of ids"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, text, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(text)
    read = real_vocab_size if name == "tokenizer.json" else eos_token_ids
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", "[]"),
        ("config.json", '{"model_type": "llama", "dtype": "float99"}'),
    ],
)
def test_what_transformers_stumbles_over_is_one_line(tmp_path, name, text):
    """It raises errors of many kinds, and reads config.json beside the tokenizer's own files."""
    folder = tiny_chat.write_chat_model(tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match="has no readable tokenizer"):
        load_tokenizer(folder)
