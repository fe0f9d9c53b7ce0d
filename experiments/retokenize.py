"""Text that one model wrote becomes a data set of another, small vocabulary.

    python experiments/retokenize.py source.paths=[data/self] path=data/small vocab_size=2048

The folder `path` gets `tokenizer/` (a byte-level BPE made from the text, unless `tokenizer` names
one), the data sets `train/` and `heldout/` (split by prompt, so that the prompts of `data=simple`
are held out) and `words.txt` (every word of the training side).
"""

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from specdec.checks import check_values, plain
from specdec.errors import DataError
from specdec.experiments.jobs import hydra_script, write_json
from specdec.training.pair_config import register

register()

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
BATCH = 20_000  # samples that are decoded and encoded at a time


class Text(NamedTuple):
    """One answer."""

    prompt: str  # the user's text
    answer: str
    ended: bool  # by the model, not by a limit
    temperature: float


def retokenize(cfg: DictConfig, folder: Path) -> float:
    """One run. Returns the training tokens."""
    from specdec.prompts.simple import HELDOUT_SHARE, is_held_out
    from specdec.training.data import write_dataset
    from specdec.training.tokenizer import load_saved, save_tokenizer, train_tokenizer

    check_values(cfg)
    if not HELDOUT_SHARE <= cfg.heldout_share < 1:
        raise DataError(f"heldout_share={cfg.heldout_share} must be from {HELDOUT_SHARE} to 1")
    path = Path(cfg.path or folder / "data")
    if path.exists():
        raise DataError(f"path={path} exists already; give the data set another folder")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    began = time.perf_counter()
    texts = list(read_texts(list(cfg.source.paths), cfg.source.tokenizer))
    sides: dict[str, list[Text]] = {"train": [], "heldout": []}
    for text in texts:
        held_out = is_held_out(text.prompt, cfg.heldout_share)
        sides["heldout" if held_out else "train"].append(text)
    if not all(sides.values()):
        counts = {name: len(side) for name, side in sides.items()}
        raise DataError(f"the split gives {counts} answers; both sides need some")
    part = path.with_name(f"{path.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if cfg.tokenizer is None:
        tokenizer = train_tokenizer(first_chars(sides["train"], cfg.bpe_chars), cfg.vocab_size)
    else:
        tokenizer = load_saved(cfg.tokenizer)
    save_tokenizer(part / "tokenizer", tokenizer)
    totals = {}
    for name, side in sides.items():
        samples = encode(side, tokenizer)
        vocab_size = tokenizer.get_vocab_size()
        totals[name] = write_dataset(part / name, samples, vocab_size=vocab_size, meta={})
    words = count_words(sides["train"])
    (part / "words.txt").write_text("\n".join(sorted(words)) + "\n", encoding="utf-8")
    part.replace(path)
    answer_bytes = {name: sum(len(t.answer.encode()) for t in side) for name, side in sides.items()}
    summary = {
        "path": str(path),
        "train": {**totals["train"], "answer_bytes": answer_bytes["train"]},
        "heldout": {**totals["heldout"], "answer_bytes": answer_bytes["heldout"]},
        "prompts": len({text.prompt for text in texts}),
        "words": len(words),
        "seconds": time.perf_counter() - began,
        "config": plain(cfg),
    }
    write_json(folder / "summary.json", summary)
    print(json.dumps({k: v for k, v in summary.items() if k != "config"}, indent=2))
    return totals["train"]["num_tokens"]


def read_texts(paths: Sequence[str], tokenizer_path: str) -> Iterator[Text]:
    """Prompts and answers of data sets that `generate.py` wrote, in the order of their samples."""
    from specdec.models.tokenizer import eos_token_ids, load_tokenizer
    from specdec.training.data import load_dataset
    from specdec.training.generation import chat_frame

    tokenizer = load_tokenizer(tokenizer_path)
    endings = set(eos_token_ids(tokenizer_path))
    frame, decode = chat_frame(tokenizer), tokenizer.backend_tokenizer.decode_batch
    data = load_dataset(paths)
    for first in range(0, len(data), BATCH):
        prompts, answers, ended, indices = [], [], [], range(first, min(first + BATCH, len(data)))
        for index in indices:
            start, length = data.starts[index], data.lengths[index]
            ids = data.tokens[data.file[index]][start : start + length].tolist()
            cut = int(length - data.num_supervised[index])
            ended.append(ids[-1] in endings)
            prompts.append(ids[:cut])
            answers.append(ids[cut : -1 if ended[-1] else None])
        asked = decode(prompts, skip_special_tokens=False)
        answered = decode(answers, skip_special_tokens=True)
        for index, prompt, answer, end in zip(indices, asked, answered, ended, strict=True):
            text = prompt.removeprefix(frame.before).removesuffix(frame.after)
            if answer.strip():
                yield Text(text, answer.strip(), end, float(data.temperature[index]))


def first_chars(texts: Iterable[Text], limit: int) -> Iterator[str]:
    """Prompts and answers until so many characters are given."""
    given = 0
    for text in texts:
        if given >= limit:
            return
        given += len(text.prompt) + len(text.answer)
        yield text.prompt
        yield text.answer


def encode(texts: Sequence[Text], tokenizer: Any) -> Iterator[Any]:
    """Samples in the chat template of the small tokenizer, answers and their ends supervised."""
    from specdec.training.data import response
    from specdec.training.tokenizer import END, ROLES

    end, (_, user, assistant) = tokenizer.token_to_id(END), map(tokenizer.token_to_id, ROLES)
    for first in range(0, len(texts), BATCH):
        chunk = texts[first : first + BATCH]
        prompts, answers = (
            tokenizer.encode_batch_fast(side, add_special_tokens=False)
            for side in ([t.prompt for t in chunk], [t.answer for t in chunk])
        )
        for text, prompt, answer in zip(chunk, prompts, answers, strict=True):
            asked = [user, *prompt.ids, end, assistant]
            yield response(asked, [*answer.ids, *[end] * text.ended], text.temperature)


def words_of(text: str) -> list[str]:
    """Words in lower case, without digits and punctuation."""
    return WORD.findall(text.lower())


def count_words(texts: Iterable[Text]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words_of(text.answer))
        counts.update(words_of(text.prompt))
    return counts


main = hydra_script("retokenize")(retokenize)

if __name__ == "__main__":
    main()
