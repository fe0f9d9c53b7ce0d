"""What two runs must share to be compared, beside their settings: short fingerprints.

Paths tell little: a file may have moved, or another may lie where it was.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from specdec.models.checkpoint import resolve_path
from specdec.prompts import PromptSet

ENDS = 64 * 1024  # bytes read at both ends of a weights file
SUFFIXES = (".safetensors", ".gguf")


def identify(target_path: str, tokenizer: Any, prompts: PromptSet) -> dict[str, str]:
    """SHA-256 of the target's checkpoint, of what makes the prompts into text, of the prompts."""
    template = prompts.chat_template or getattr(tokenizer, "chat_template", None)
    return {
        "target_sha256": checkpoint_sha256(resolve_path(target_path)),
        "template_sha256": _sha256([template, prompts.system_prompt]),
        "prompts_sha256": _sha256([[p.prompt_id, p.category, p.turns] for p in prompts.prompts]),
    }


def checkpoint_sha256(path: Path) -> str:
    """Of a checkpoint's files: config.json, and each weights file's size and both of its ends."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(path.iterdir())
    for file in files:
        if file.name == "config.json":
            digest.update(file.read_bytes())
        elif file.suffix in SUFFIXES:
            size = file.stat().st_size
            with file.open("rb") as opened:
                digest.update(f"{size}".encode() + opened.read(ENDS))
                opened.seek(max(0, size - ENDS))
                digest.update(opened.read(ENDS))
    return digest.hexdigest()


def _sha256(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
