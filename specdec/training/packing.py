"""Rows: samples laid end to end on one axis, attention kept inside each, in a fixed order."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.errors import DataError
from specdec.training.data import TokenData


class Row(NamedTuple):
    """One micro-batch of T columns and D documents; unused columns form last documents of zeros.

    A head fed (hidden of column p, id of column p + 1) predicts the id of column p + 2, so the mask
    follows the label: `labels` lists the columns whose id is to be predicted.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restarting at 0 in each document
    cu_seqlens: Tensor  # [D + 1] int32
    max_len: int  # longest document
    labels: Tensor  # [N] int64 columns, ascending; never a document's first
    num_tokens: int  # columns in use
    samples: tuple[int, ...]  # indices in the data set


class Cursor(NamedTuple):
    """Where the next optimiser step begins."""

    epoch: int
    window: int  # accumulation windows of the epoch that are done


def epoch_rows(data: TokenData, *, row_tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Sample indices of each row of an epoch: a permutation keyed by (seed, epoch), cut in order.

    Raises:
        DataError: a sample is longer than a row.
    """
    longest = int(data.lengths.max())
    if longest > row_tokens:
        raise DataError(
            f"a sample of {longest} tokens exceeds train_data.row_tokens={row_tokens}; raise it"
        )
    order = np.random.default_rng((seed, epoch)).permutation(len(data))
    ends = np.cumsum(data.lengths[order])
    rows, first, used = [], 0, 0
    while first < len(order):
        last = int(np.searchsorted(ends, used + row_tokens, side="right"))
        rows.append(order[first:last])
        first, used = last, int(ends[last - 1])
    return rows


def windows(
    data: TokenData, *, row_tokens: int, accumulation: int, seed: int, start: Cursor, epochs: int
) -> Iterator[tuple[Cursor, list[Row]]]:
    """Each step's rows, and the cursor that follows it. An epoch's last window may be shorter.

    Args:
        accumulation: rows per optimiser step.
        start: the first window to yield; Cursor(0, 0) for a new run.
        epochs: the number of passes over the data.
    """
    for epoch in range(start.epoch, epochs):
        rows = epoch_rows(data, row_tokens=row_tokens, seed=seed, epoch=epoch)
        num_windows = -(-len(rows) // accumulation)
        for window in range(start.window if epoch == start.epoch else 0, num_windows):
            chosen = rows[window * accumulation : (window + 1) * accumulation]
            done = window + 1 == num_windows
            following = Cursor(epoch + 1, 0) if done else Cursor(epoch, window + 1)
            yield following, [make_row(data, samples, row_tokens) for samples in chosen]


def make_row(data: TokenData, samples: np.ndarray, row_tokens: int) -> Row:
    """Lay samples end to end on an axis of `row_tokens` columns."""
    lengths = data.lengths[samples]
    used, longest = int(lengths.sum()), int(lengths.max())
    empty, rest = divmod(row_tokens - used, longest)
    lengths = np.concatenate([lengths, [longest] * empty, [rest] if rest else []]).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(row_tokens) - np.repeat(starts[:-1], lengths)
    ids = np.zeros(row_tokens, dtype=np.int64)
    supervised = np.zeros(row_tokens, dtype=bool)
    for sample, column in zip(samples, starts, strict=False):
        source = slice(data.starts[sample], data.starts[sample] + data.lengths[sample])
        target = slice(column, column + data.lengths[sample])
        ids[target] = data.tokens[data.file[sample]][source]
        supervised[target] = data.supervised[data.file[sample]][source]
    return Row(
        input_ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_len=longest,
        labels=torch.from_numpy(np.flatnonzero(supervised & (positions > 0))),
        num_tokens=used,
        samples=tuple(samples.tolist()),
    )


def count_labels(rows: list[Row], num_steps: int) -> list[int]:
    """Supervised labels of each unroll step: step k reaches labels at position k + 2 and later."""
    positions = torch.cat([row.positions[row.labels] for row in rows])
    return [int((positions >= k + 2).sum()) for k in range(num_steps)]


def to_device(row: Row, device: torch.device) -> Row:
    """The row on `device`, copied without waiting for the device."""

    def move(x: Tensor) -> Tensor:
        return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

    return row._replace(
        input_ids=move(row.input_ids),
        positions=move(row.positions),
        cu_seqlens=move(row.cu_seqlens),
        labels=move(row.labels),
    )
