"""Tiny random models on disk and in memory, and batches written out by hand, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdec.models.batch import NULL_BLOCK, AttentionGroup, Batch, Cache, CacheShape, Draft, Target
from specdec.models.decoder import DecoderParams, load_decoder
from specdec.models.eagle import EagleConfig, EagleHead, eagle_draft, init_head
from specdec.models.eagle_checkpoint import save_head
from specdec.models.layers import map_tree
from specdec.models.llama import LlamaConfig, llama_target
from specdec.models.llama_checkpoint import layer_layout, llama_config, llama_layout
from specdec.models.parts import shapes_of

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A config.json of a tiny Llama; overrides by Hugging Face key names."""
    return {**TINY, **overrides}


def tiny_state(config: dict[str, Any], seed: int = 0, scale: float = 0.3) -> dict[str, Tensor]:
    """Random fp32 tensors of a Llama checkpoint under their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    settings = llama_config(config)
    shapes = {"model.embed_tokens.weight": (settings.vocab_size, settings.hidden_size)}
    if not settings.tie_word_embeddings:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for index in range(settings.num_layers):
        shapes |= shapes_of(layer_layout(settings, f"model.layers.{index}."))
    state = {
        name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()
    }
    norms = [name for name in state if "norm" in name]
    for name in norms:
        state[name] = 1 + state[name]
    state["model.norm.weight"] = 1 + 0.1 * torch.randn(settings.hidden_size, generator=generator)
    return state


def write_checkpoint(folder: str | Path, config: dict[str, Any], state: dict[str, Tensor]) -> Path:
    """A Hugging Face folder: config.json and model.safetensors."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class InMemory(dict):
    """A state dict with the interface of a `Checkpoint`."""

    path = Path("memory/model.safetensors")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)


def tiny_params(
    seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32, **overrides: Any
) -> tuple[DecoderParams, LlamaConfig]:
    """Plain parameters of a tiny Llama, without a file."""
    config = tiny_config(**overrides)
    state = InMemory(tiny_state(config, seed))
    settings = llama_config(config)
    return load_decoder(state, llama_layout(settings), device, dtype), settings


def tiny_target(
    seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32, **overrides: Any
) -> Target:
    """A tiny random Llama target; overrides by Hugging Face key names."""
    return llama_target(*tiny_params(seed, device, dtype, **overrides))


def tiny_head(target: Target, seed: int = 1, num_layers: int = 1) -> tuple[EagleHead, EagleConfig]:
    """A random Eagle head for a tiny target, plain tensors in its dtype and device."""
    block = replace(target.config, num_layers=num_layers, tie_word_embeddings=False)
    head = init_head(block, device=target.embed.device, dtype=target.embed.dtype)
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        random = torch.randn(tensor.shape, generator=generator) * 0.3
        return tensor + random.to(tensor.device, tensor.dtype)

    return map_tree(noise, head), EagleConfig(block)


def tiny_draft(target: Target, seed: int = 1, num_layers: int = 1, **shared: Any) -> Draft:
    """A random Eagle draft; keywords of `eagle_draft` (embed, lm_head, d2t)."""
    return eagle_draft(*tiny_head(target, seed, num_layers), target, **shared)


def write_target(folder: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """A tiny random Llama as a Hugging Face folder."""
    config = tiny_config(**overrides)
    return write_checkpoint(folder, config, tiny_state(config, seed))


def write_draft(folder: str | Path, target: Target, seed: int = 1, **own: Any) -> Path:
    """A tiny random Eagle head in the published layout, fp32; keywords of `save_head`."""
    head, config = tiny_head(target, seed)
    save_head(folder, head, config, dtype=torch.float32, **own)
    return Path(folder)


class Step(NamedTuple):
    """One request's part of a batch."""

    token_ids: Sequence[int]
    start: int  # position of the first of them
    blocks: Sequence[int]  # its block table
    num_logits: int | None = None  # rows that want logits, the last ones; None: all
    slot: int | None = None  # row of State; None: the step's place in the batch


def make_batch(
    steps: Sequence[Step],
    block_size: int,
    *,
    num_padding: int = 0,
    device: str = "cpu",
    short: int = 8,
) -> Batch:
    """A `Batch` of these steps, then `num_padding` padding rows as one more request.

    Requests are put in two attention groups, of at most and of more than `short` rows.
    """
    steps = list(steps)
    if num_padding:
        steps.append(Step([0] * num_padding, 0, [NULL_BLOCK], 0))
    ids, positions, slots, logits, groups = [], [], [], [], {}
    query_start, cu_logits = [0], [0]
    for index, step in enumerate(steps):
        padding = bool(num_padding) and index == len(steps) - 1
        first = len(ids)
        for offset, token in enumerate(step.token_ids):
            position = 0 if padding else step.start + offset
            ids.append(token)
            positions.append(position)
            slots.append(step.blocks[position // block_size] * block_size + position % block_size)
        rows = list(range(first, len(ids)))
        wanted = len(rows) if step.num_logits is None else step.num_logits
        logits += rows[len(rows) - wanted :]
        query_start.append(len(ids))
        cu_logits.append(len(logits))
        groups.setdefault(len(rows) <= short, []).append((rows, step.blocks))

    def group(members: list) -> AttentionGroup:
        num_queries = max(len(rows) for rows, _ in members)
        width = max(max(positions[row] for row in rows) for rows, _ in members) // block_size + 1
        index = [rows + [rows[0]] * (num_queries - len(rows)) for rows, _ in members]
        tables = [[*blocks[:width], *[blocks[0]] * (width - len(blocks))] for _, blocks in members]
        query_index = torch.tensor(index)
        visible = torch.tensor(positions)[query_index][..., None]
        return AttentionGroup(
            query_index.to(device),
            torch.tensor(tables).to(device),
            (torch.arange(width * block_size) <= visible).to(device),
        )

    most = max(len(step.blocks) for step in steps)
    tables = [[*step.blocks, *[NULL_BLOCK] * (most - len(step.blocks))] for step in steps]

    def tensor(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    valid = torch.ones(len(ids), dtype=torch.bool, device=device)
    valid[len(ids) - num_padding :] = False
    return Batch(
        input_ids=tensor(ids),
        positions=tensor(positions),
        query_start=tensor(query_start),
        seq_lens=tensor(
            [step.start + len(step.token_ids) for step in steps[: len(steps) - bool(num_padding)]]
            + [0] * bool(num_padding)
        ),
        slot_mapping=tensor(slots),
        block_tables=tensor(tables),
        logits_indices=tensor(logits),
        cu_num_logits=tensor(cu_logits),
        request_slots=tensor([i if s.slot is None else s.slot for i, s in enumerate(steps)]),
        row_valid=valid,
        groups=tuple(group(members) for _, members in sorted(groups.items(), reverse=True)),
        block_size=block_size,
        max_query_len=max(len(step.token_ids) for step in steps),
    )


def new_cache(
    model: Target | Draft, num_blocks: int, block_size: int, num_slots: int = 8, window: int = 4
) -> Any:
    """A model's cache; rows of a step with rejections are at most `window`."""
    return model.new_cache(CacheShape(num_blocks, block_size, num_slots, window))


def prefill(
    target: Target, prompts: Sequence[Sequence[int]], cache: Cache, block_size: int, chunk: int = 0
) -> list[Tensor]:
    """Hidden states [n, H] of each prompt, run together in chunks (0: whole); blocks from 1 on."""
    tables, first = [], 1
    for prompt in prompts:
        count = (len(prompt) + block_size - 1) // block_size
        tables.append(list(range(first, first + count)))
        first += count
    hidden: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk or max(map(len, prompts))):
        live = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
        stop = start + (chunk or max(map(len, prompts)))
        batch = make_batch(
            [Step(prompts[i][start:stop], start, tables[i], slot=i) for i in live],
            block_size,
            device=str(target.embed.device),
        )
        out = target.forward(batch, cache).hidden
        for i, a, b in zip(live, batch.query_start, batch.query_start[1:], strict=False):
            hidden[i].append(out[a:b])
    return [torch.cat(parts) for parts in hidden]


def logits(target: Target, prompt: Sequence[int] = (5, 9, 20, 33, 7)) -> Tensor:
    """Logits [n, V] of one prompt in a cache of its own."""
    cache = new_cache(target, len(prompt) // 4 + 2, 4)
    return target.logits(prefill(target, [prompt], cache, 4)[0])


def one_line_error(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    """Expects a one-line message."""
    with pytest.raises(error, match=match) as raised:
        call()
    assert "\n" not in str(raised.value)
