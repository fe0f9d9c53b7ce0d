"""Tokenizers from a Hugging Face folder or from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import CheckpointError
from specdec.models.checkpoint import read_object, resolve_path
from specdec.models.gguf import metadata

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
TOKENIZER_FILES = ("tokenizer_config.json", "vocab.json", "tokenizer.model")
EOS_KEYS = ("eos_token_id", "eot_token_id")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a checkpoint, with its chat template and special ids.

    Raises CheckpointError when there is none, or its pre-tokenizer is not known.
    """
    from transformers import AutoTokenizer

    where = resolve_path(path)
    file = _gguf_file(where)
    if file is not None:
        return _gguf_tokenizer(file)
    folder = where if where.is_dir() else where.parent
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of what the files hold, and transformers checks little of it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{folder} has no readable tokenizer: {reason}") from error


def eos_token_ids(source: str | Path | PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The ids that end a sequence, as the model declares them; of a checkpoint or a tokenizer.

    A folder's generation_config.json, then config.json, then its tokenizer; a GGUF file's
    eos and eot ids. Ids that other programs also stop at (SmolLM2's `<|endoftext|>`) are not
    added.
    """
    if not isinstance(source, str | Path):
        return () if source.eos_token_id is None else (source.eos_token_id,)
    where = resolve_path(source)
    file = _gguf_file(where)
    if file is not None:
        declared = (metadata(file).get(f"tokenizer.ggml.{key}") for key in EOS_KEYS)
        return tuple(dict.fromkeys(int(id_) for id_ in declared if id_ is not None))
    folder = where if where.is_dir() else where.parent
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            declared = read_object(folder / name).get("eos_token_id")
            if declared is not None:
                ids = tuple(declared) if isinstance(declared, list) else (declared,)
                if not all(isinstance(id_, int) and id_ >= 0 for id_ in ids):
                    raise CheckpointError(
                        f"{folder / name}: eos_token_id={declared!r} must be an id or a list of ids"
                    )
                return ids
    return eos_token_ids(load_tokenizer(folder))


def real_vocab_size(path: str | Path) -> int | None:
    """One past the largest id in a folder's tokenizer.json; None when there is no such file.

    Matrices are often padded past it; the ids in between are never drafted nor emitted.
    """
    where = resolve_path(path)
    file = (where if where.is_dir() else where.parent) / "tokenizer.json"
    if where.suffix == ".gguf" or not file.exists():
        return None
    return 1 + max(_tokenizer_json(file), default=-1)


def token_strings(path: str | Path) -> dict[int, str] | None:
    """Every token of a checkpoint's own tokenizer by its id; None when it brings no tokenizer."""
    where = resolve_path(path)
    gguf = _gguf_file(where)
    if gguf is not None:
        return dict(enumerate(metadata(gguf).get("tokenizer.ggml.tokens") or ())) or None
    folder = where if where.is_dir() else where.parent
    if (folder / "tokenizer.json").exists():
        return _tokenizer_json(folder / "tokenizer.json")
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        return {id_: token for token, id_ in load_tokenizer(folder).get_vocab().items()}
    return None


def check_same_tokenizer(target: str | Path, draft: str | Path) -> None:
    """Refuses a draft whose own tokenizer gives an id another token than the target's does.

    One may have more ids than the other: those past the target's are never drafted. A draft without
    a tokenizer of its own takes the target's. Raises CheckpointError naming the first such id.
    """
    theirs, own = token_strings(target), token_strings(draft)
    if theirs is None or own is None:
        return
    for id_ in sorted(theirs.keys() & own.keys()):
        if theirs[id_] != own[id_]:
            raise CheckpointError(
                f"the draft {draft} has another tokenizer than the target {target}: id {id_} is "
                f"{own[id_]!r} and {theirs[id_]!r}; use a draft made for this target"
            )


def _tokenizer_json(file: Path) -> dict[int, str]:
    tokenizer = read_object(file)
    try:
        vocab = tokenizer["model"].get("vocab") or {}
        if isinstance(vocab, dict):
            tokens = {int(id_): token for token, id_ in vocab.items()}
        else:  # Unigram: [token, score] in the order of ids
            tokens = {id_: token for id_, (token, _) in enumerate(vocab)}
        added = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        kind = type(error).__name__
        raise CheckpointError(f"{file} is not a tokenizer's file ({kind}: {error})") from error
    return tokens | added


def _gguf_file(path: Path) -> Path | None:
    if path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return files[0] if len(files) == 1 and not (path / "tokenizer.json").exists() else None


def _gguf_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    fields = metadata(file)
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(f"{file.name}: tokenizer {kind!r} is not supported; known: 'gpt2'")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(fields.get("tokenizer.ggml.pre", "default"), file)
    tokenizer.decoder = decoders.ByteLevel()
    added = zip(tokens, fields.get("tokenizer.ggml.token_type") or (), strict=False)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in added
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    if fields.get("tokenizer.ggml.add_bos_token"):
        from tokenizers.processors import TemplateProcessing

        bos = fields["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]} $B",
            special_tokens=[(tokens[bos], bos)],
        )
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special: dict[str, Any] = {
        f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in names.items()
        if f"tokenizer.ggml.{theirs}_token_id" in fields
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _pre_tokenizer(name: str, file: Path) -> Any:
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if name in ("default", "gpt-2"):
        return byte_level
    raise CheckpointError(
        f"{file.name}: pre-tokenizer {name!r} is not supported; known: smollm, gpt-2"
    )
