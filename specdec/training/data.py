"""Token data sets: a flat file of ids, a flat mask of which ids are supervised, and an index.

A data set is a folder with `tokens.npy` (uint16 or uint32), `supervised.npy` (bool), `samples.npy`
([n, 2] int64: start and length) and `temperature.npy` ([n] float32), beside `meta.json`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec.errors import DataError

FILES = ("tokens", "supervised", "samples", "temperature")
ENDS = 1 << 16  # ids read at both ends of a file for its fingerprint


class Sample(NamedTuple):
    """One conversation. `supervised[i]`: the head is taught to predict `token_ids[i]`."""

    token_ids: Sequence[int] | np.ndarray
    supervised: Sequence[bool] | np.ndarray
    temperature: float  # at which the target wrote the supervised ids


@dataclass(frozen=True)
class TokenData:
    """n samples, laid end to end in one or more files."""

    tokens: tuple[np.ndarray, ...]  # one flat array of ids a file
    supervised: tuple[np.ndarray, ...]  # bool, aligned with tokens
    file: np.ndarray  # [n] which file a sample lies in
    starts: np.ndarray  # [n]
    lengths: np.ndarray  # [n]
    num_supervised: np.ndarray  # [n]
    temperature: np.ndarray  # [n] float32
    vocab_size: int

    def __len__(self) -> int:
        return len(self.starts)


def response(prompt_ids: Sequence[int], output_ids: Sequence[int], temperature: float) -> Sample:
    """A prompt and what the target wrote after it; only the latter is supervised."""
    supervised = [False] * len(prompt_ids) + [True] * len(output_ids)
    return Sample([*prompt_ids, *output_ids], supervised, temperature)


def write_dataset(
    path: str | Path, samples: Iterable[Sample], *, vocab_size: int, meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a data set as a whole: another process sees either no folder or a complete one.

    Args:
        meta: written to meta.json beside the counts.

    Returns:
        The contents of meta.json.

    Raises:
        DataError: the folder exists, or there is nothing to write.
    """
    path = Path(path)
    if path.exists():
        raise DataError(f"{path} exists already; give the data set another path")
    samples = list(samples)
    if not samples:
        raise DataError(f"no sample to write to {path}")
    lengths = np.array([len(s.token_ids) for s in samples], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    supervised = np.concatenate([np.asarray(s.supervised, dtype=bool) for s in samples])
    arrays = {
        "tokens": np.concatenate([np.asarray(s.token_ids, dtype=dtype) for s in samples]),
        "supervised": supervised,
        "samples": np.stack([starts, lengths], axis=1),
        "temperature": np.array([s.temperature for s in samples], dtype=np.float32),
    }
    counts = {
        "vocab_size": vocab_size,
        "num_samples": len(samples),
        "num_tokens": int(lengths.sum()),
        "num_supervised": int(supervised.sum()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name in FILES:
        np.save(partial / f"{name}.npy", arrays[name])
    (partial / "meta.json").write_text(json.dumps({**meta, **counts}, indent=2) + "\n")
    os.replace(partial, path)
    return {**meta, **counts}


def merge_datasets(
    paths: Sequence[str | Path], path: str | Path, *, meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Write several data sets as one; arguments and result as in `write_dataset`."""
    parts = [_open(Path(part)) for part in paths]
    samples = []
    for arrays, _ in parts:
        tokens, supervised = arrays["tokens"], arrays["supervised"]
        for (start, length), temperature in zip(
            arrays["samples"], arrays["temperature"], strict=True
        ):
            span = slice(start, start + length)
            samples.append(Sample(tokens[span], supervised[span], float(temperature)))
    return write_dataset(path, samples, vocab_size=parts[0][1]["vocab_size"], meta=meta)


def load_dataset(
    paths: str | Path | Sequence[str | Path],
    *,
    num_tokens: int | None = None,
    vocab_size: int | None = None,
) -> TokenData:
    """Open one or more data sets as one, memory-mapped.

    Args:
        num_tokens: keep the first samples that hold this many supervised tokens; all when None.
        vocab_size: of the target; a data set of another size is refused.

    Raises:
        DataError: a path is absent or incomplete, vocabularies differ, no token is supervised, or
            there are fewer supervised tokens than asked for.
    """
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    if not paths:
        raise DataError(
            "no training data; set train_data.paths to the folder that generate.py wrote"
        )
    parts = [_open(Path(path)) for path in paths]
    sizes = {meta["vocab_size"] for _, meta in parts}
    if vocab_size is not None:
        sizes.add(vocab_size)
    if len(sizes) > 1:
        raise DataError(f"vocabulary sizes {sorted(sizes)} differ between {paths} and the target")
    file = np.concatenate([np.full(len(a["samples"]), i) for i, (a, _) in enumerate(parts)])
    index = np.concatenate([a["samples"] for a, _ in parts])
    counts = np.concatenate([_count_supervised(a) for a, _ in parts])
    keep = len(index)
    if num_tokens is not None:
        cumulative = np.cumsum(counts)
        if not len(cumulative) or cumulative[-1] < num_tokens:
            have = int(cumulative[-1]) if len(cumulative) else 0
            raise DataError(
                f"train_data.num_tokens={num_tokens} but {paths} hold {have} supervised tokens"
            )
        keep = int(np.searchsorted(cumulative, num_tokens)) + 1
    if not counts[:keep].sum():
        raise DataError(f"no supervised token in {paths}: every label is masked, nothing to learn")
    return TokenData(
        tokens=tuple(a["tokens"] for a, _ in parts),
        supervised=tuple(a["supervised"] for a, _ in parts),
        file=file[:keep],
        starts=index[:keep, 0],
        lengths=index[:keep, 1],
        num_supervised=counts[:keep],
        temperature=np.concatenate([a["temperature"] for a, _ in parts])[:keep],
        vocab_size=sizes.pop(),
    )


def _open(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    missing = [f for f in (*(f"{n}.npy" for n in FILES), "meta.json") if not (path / f).is_file()]
    if missing:
        raise DataError(f"{path} is not a data set of experiments/generate.py: no {missing[0]}")
    try:
        arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in FILES}
        meta = json.loads((path / "meta.json").read_text())
        meta["vocab_size"]
    except (ValueError, EOFError, KeyError, TypeError) as error:
        raise DataError(f"{path} holds a damaged data set; write it again ({error})") from error
    return arrays, meta


def _count_supervised(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    if not len(arrays["samples"]):
        return np.zeros(0, dtype=np.int64)
    total = np.concatenate([[0], np.cumsum(arrays["supervised"], dtype=np.int64)])
    starts, lengths = arrays["samples"].T
    return total[starts + lengths] - total[starts]


def fingerprint(data: TokenData) -> str:
    """SHA-256 of where its samples lie and of the ids at both ends of each file: a data set that
    moved has the same, one that was written anew another."""
    digest = hashlib.sha256()
    for array in (data.file, data.starts, data.lengths, data.num_supervised):
        digest.update(np.ascontiguousarray(array).tobytes())
    for tokens in data.tokens:
        digest.update(tokens[:ENDS].tobytes() + tokens[-ENDS:].tobytes())
    return digest.hexdigest()


def repeated_ngram_share(token_ids: Sequence[int], n: int = 8) -> float:
    """Share of a text's n-grams that occurred before in it; 0 for a text shorter than n."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    if len(ids) < n:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(ids, n)
    powers = np.uint64(0x9E3779B97F4A7C15) ** np.arange(n, dtype=np.uint64)
    hashes = (windows * powers).sum(axis=1, dtype=np.uint64)  # polynomial hash modulo 2^64
    return 1.0 - len(np.unique(hashes)) / len(hashes)


def rank_ids(data: TokenData) -> torch.Tensor:
    """Every id of the vocabulary [V] int64, by how often it is supervised, most frequent first.

    Equal counts go by id; so ids that never occur come last, and any prefix is a vocabulary.
    """
    counts = np.zeros(data.vocab_size, dtype=np.int64)
    for file, (tokens, supervised) in enumerate(zip(data.tokens, data.supervised, strict=True)):
        mine = data.file == file
        if mine.any():
            end = int((data.starts[mine] + data.lengths[mine]).max())
            counts += np.bincount(tokens[:end][supervised[:end]], minlength=data.vocab_size)
    return torch.from_numpy(np.argsort(-counts, kind="stable"))
