"""Little stories that need no model, as a data set of experiments/retokenize.py."""

import random
from pathlib import Path

from specdec.experiments.retokenize import Text, count_words, encode
from specdec.prompts.training import fill, load_bank
from specdec.training.data import write_dataset
from specdec.training.tokenizer import save_tokenizer, train_tokenizer

VOCAB = 320
STORIES = (
    "Once there was {trait#an} {animal} named {name}. {name} lived in {place} and had {thing}.",
    "{name} found {thing} in {place}. {name} was {feeling}, and the {animal} was {feeling#2}.",
)


def small_texts(num: int, seed: int = 0) -> list[Text]:
    bank, rng = load_bank("simple.jsonl"), random.Random(seed)
    return [
        Text(
            fill("Write about {animal#an} in {place}.", bank.fillers, rng),
            fill(rng.choice(STORIES), bank.fillers, rng),
            True,
            0.0,
        )
        for _ in range(num)
    ]


def write_small_data(folder: Path, num: int = 240) -> Path:
    """`tokenizer/`, `train/`, `heldout/` and `words.txt`."""
    texts, heldout = small_texts(num), small_texts(num // 6, seed=1)
    tokenizer = train_tokenizer((part for t in texts for part in (t.prompt, t.answer)), VOCAB)
    save_tokenizer(folder / "tokenizer", tokenizer)
    for name, side in (("train", texts), ("heldout", heldout)):
        write_dataset(folder / name, encode(side, tokenizer), vocab_size=VOCAB, meta={})
    (folder / "words.txt").write_text("\n".join(count_words(texts)))
    return folder
