"""A small byte-level BPE tokenizer with a chat template, made from text."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END, ROLES = "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL = (END, *ROLES)  # ids 0 to 3
TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Byte-level BPE of exactly `vocab_size` ids: the special ones, all 256 bytes, merges.

    What no merge covers falls back to bytes, so any text comes back unchanged. Digits stand alone.

    Raises:
        DataError: too few ids asked for, or too little text for so many.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = len(SPECIAL) + NUM_BYTES
    if vocab_size < least:
        raise DataError(f"vocab_size={vocab_size} must be at least {least}: bytes and special ids")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(
            f"the text gives {tokenizer.get_vocab_size()} ids and vocab_size={vocab_size}; "
            "lower it or bring more text"
        )
    return tokenizer


def save_tokenizer(folder: str | Path, tokenizer: "Tokenizer") -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json, as transformers
    reads them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", settings)
    ids = {f"{name}_token_id": tokenizer.token_to_id(END) for name in ("eos", "pad")}
    _write(folder / "generation_config.json", ids)


def load_saved(folder: str | Path) -> "Tokenizer":
    """The tokenizer of a folder that `save_tokenizer` wrote."""
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json; give the folder of experiments/retokenize.py"
        )
    return Tokenizer.from_file(str(file))


def bytes_of_ids(tokenizer: "Tokenizer") -> list[int]:
    """Bytes of text that each id stands for; 0 for the special ones."""
    special = {tokenizer.token_to_id(token) for token in SPECIAL}
    strings = (tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size()))
    # in a byte-level vocabulary every character is one byte
    return [0 if id_ in special else len(text) for id_, text in enumerate(strings)]


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
