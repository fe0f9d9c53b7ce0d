"""Offline W&B runs, read back without a server: the record file and the tables beside it.

The record file (`run-ID.wandb`) is a header of 7 bytes and then LevelDB's log format: blocks of
32 KiB, each record in one or more pieces of CRC-32, length, kind and bytes of a protobuf message.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specdec.errors import DataError

FILE_HEADER, BLOCK = 7, 32768
PIECE = struct.Struct("<IHB")  # CRC-32 of kind and bytes, length, kind
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class WandbRun(NamedTuple):
    """What a run logged, as plain values."""

    run_id: str
    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    exit_code: int | None  # None: the run never ended


def read_wandb(file: Path) -> WandbRun:
    """Read an offline run.

    Raises:
        DataError: the file is no record file, or begins no run.
    """
    from wandb.proto import wandb_internal_pb2

    run_id, name, exit_code = "", "", None
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for data in read_records(file):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id, name = record.run.run_id, record.run.display_name
            _apply_(config, record.run.config)
        elif kind == "config":
            _apply_(config, record.config)
        elif kind == "summary":
            _apply_(summary, record.summary)
        elif kind == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                _set_(row, item)
            history.append(row)
        elif kind == "exit":
            exit_code = record.exit.exit_code
    if not run_id:
        raise DataError(f"{file} holds no W&B run")
    config.pop("_wandb", None)
    return WandbRun(run_id, name, config, summary, history, exit_code)


def read_records(file: Path) -> Iterator[bytes]:
    """The messages of a record file; of one that was cut off, those that are whole.

    Raises:
        DataError: it is no such file, or damaged before its end.
    """
    data = file.read_bytes()
    if data[:4] != b":W&B":
        raise DataError(f"{file} is no W&B record file")
    position, pieces = FILE_HEADER, b""
    while position + PIECE.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < PIECE.size:
            position += left
            continue
        checksum, length, kind = PIECE.unpack_from(data, position)
        if kind == 0:  # room that was never written
            return
        start, end = position + PIECE.size, position + PIECE.size + length
        if end > len(data):
            return
        if zlib.crc32(data[start - 1 : end]) != checksum:
            raise DataError(f"{file} is damaged at byte {position}")
        pieces = data[start:end] if kind in (WHOLE, FIRST) else pieces + data[start:end]
        if kind in (WHOLE, LAST):
            yield pieces
        position = end


def read_table(file: Path, run: WandbRun, key: str) -> list[dict[str, Any]]:
    """Rows of a table that the run logged.

    Raises:
        DataError: there is none under this key, or its file is not beside the run.
    """
    path = (run.summary.get(key) or {}).get("path")
    if path is None:
        raise DataError(f"the W&B run {file} has no table {key!r}")
    where = file.parent / "files" / path
    try:
        table = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the table {where} cannot be read: {error}") from error
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def _apply_(values: dict[str, Any], change: Any) -> None:
    for item in change.remove:
        *parents, last = item.nested_key or [item.key]
        node: Any = values
        for parent in parents:
            node = node.get(parent, {})
        node.pop(last, None)
    for item in change.update:
        _set_(values, item)


def _set_(values: dict[str, Any], item: Any) -> None:
    *parents, last = item.nested_key or [item.key]
    for parent in parents:
        inner = values.get(parent)
        values = values.setdefault(parent, {}) if inner is None or isinstance(inner, dict) else {}
    values[last] = json.loads(item.value_json)
