"""Random token data sets and rows, for tests."""

import numpy as np
import torch

from specdec.training.data import Sample, load_dataset, response, write_dataset
from specdec.training.packing import Row

VOCAB = 97


def random_samples(lengths: list[int], seed: int = 0, prompt: int = 3) -> list[Sample]:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(1, VOCAB, n).tolist() for n in lengths]
    return [response(ids[:prompt], ids[prompt:], 1.0) for ids in texts]


def dataset(tmp_path, lengths: list[int], name: str = "data", **keywords):
    write_dataset(tmp_path / name, random_samples(lengths, **keywords), vocab_size=VOCAB, meta={})
    return load_dataset(tmp_path / name)


def make_row_of(lengths: list[int]):
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(starts[-1])
    return Row(
        input_ids=torch.arange(total),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        cu_seqlens=torch.from_numpy(starts),
        max_len=max(lengths),
        labels=torch.arange(total),
        num_tokens=total,
        samples=(),
    )


def row_of_texts(texts: list[list[int]]) -> Row:
    row = make_row_of([len(text) for text in texts])
    return row._replace(input_ids=torch.tensor([token for text in texts for token in text]))


def random_problem(row, num_steps: int, width: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    columns = len(row.input_ids)
    hidden = torch.randn(num_steps, columns, width, generator=generator).requires_grad_()
    target = torch.randn(columns, width, generator=generator)
    return hidden, target, torch.randn(VOCAB, width, generator=generator)
