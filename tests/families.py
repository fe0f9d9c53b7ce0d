"""What every target family must do, against tiny random models that transformers writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from drafters import adversary, mixed, oracle, scripted
from running import requests, tiny_engine
from tiny import InMemory, Step, make_batch, prefill
from token_data import row_of_texts
from torch import Tensor

from specdec.experiments.targets import packed_forward
from specdec.generate import generate
from specdec.models.batch import CacheShape, Target
from specdec.models.parts import shapes_of
from specdec.propose.ngram import ngram
from specdec.verify.rejection import rejection

PROMPTS = [[7, 3, 60, 2, 9, 9, 41, 5, 1, 13, 22], [11], list(range(2, 40))]
LOSSLESS = [[5, 9, 11], list(range(3, 40)), [7] * 9, [50, 60, 42, 45], [4, 4, 5, 5, 4, 4, 5]]


def write_model(folder: Path, model: Any, seed: int = 0, **options: Any) -> Any:
    """Random weights for a transformers model, saved in `folder` in small shards."""
    generator = torch.Generator().manual_seed(seed)

    def random(tensor: Tensor, scale: float) -> Tensor:
        return torch.randn(tensor.shape, generator=generator) * scale

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.copy_(1 + random(tensor, 0.3))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(random(tensor, 0.2))
            elif "inv_freq" not in name:
                tensor.copy_(random(tensor, 0.3))
    model.tie_weights()
    model = model.float().eval()
    model.save_pretrained(folder, **{"max_shard_size": "20KB", **options})
    return model


def random_state(layout: Any, seed: int = 0, scale: float = 0.3) -> InMemory:
    """A random fp32 checkpoint in memory with the tensors of a layout."""
    generator = torch.Generator().manual_seed(seed)
    state = InMemory()
    for name, shape in shapes_of(layout).items():
        random = torch.randn(shape, generator=generator) * scale
        state[name] = 1 + random if "norm" in name else random
    return state


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@torch.no_grad()
def reference_logits(model: Any, prompt: Sequence[int]) -> Tensor:
    return model(torch.tensor([prompt])).logits[0]


def check_chunks(ours: Target, theirs: Any, chunk: int) -> None:
    """Prompts prefilled together, whole (0) or in chunks."""
    hidden = prefill(ours, PROMPTS, ours.new_cache(CacheShape(40, 4, 4, 4)), 4, chunk)
    for prompt, rows in zip(PROMPTS, hidden, strict=True):
        expected = reference_logits(theirs, prompt)
        assert relative_error(ours.logits(rows), expected) <= 1e-4


def check_decode(ours: Target, theirs: Any, block_size: int) -> None:
    """Verify-shaped steps of K + 1 rows, K = 2 and 4, with a prefill chunk and padding beside."""
    first, second = [5, 9, 20, 33, 7, 8, 1, 2, 3, 4, 60], list(range(3, 30))
    cache = ours.new_cache(CacheShape(80, block_size, 4, 8))
    tables = [list(range(1, 1 + 30 // block_size + 1)), list(range(40, 40 + 30 // block_size + 1))]
    steps = [(first[:3], 0, second[:2], 0), (first[3:6], 3, second[2:14], 2)]
    steps += [(first[6:11], 6, second[14:27], 14)]
    rows: list[list[Tensor]] = [[], []]
    for ids, start, other, other_start in steps:
        batch = make_batch(
            [Step(ids, start, tables[0]), Step(other, other_start, tables[1])],
            block_size,
            num_padding=3,
        )
        hidden = ours.forward(batch, cache).hidden
        assert torch.isfinite(hidden).all()
        rows[0].append(hidden[: len(ids)])
        rows[1].append(hidden[len(ids) : len(ids) + len(other)])
    for prompt, parts in zip((first, second), rows, strict=True):
        logits = ours.logits(torch.cat(parts))
        assert relative_error(logits, reference_logits(theirs, prompt)) <= 1e-4


def check_rejected_rows(ours: Target, theirs: Any) -> None:
    """Rows written past the committed length are overwritten by the next step's."""
    prompt, cache = [5, 9, 20, 33, 7, 8], ours.new_cache(CacheShape(8, 4, 1, 4))
    ours.forward(make_batch([Step([5, 9, 61, 62, 63], 0, [1, 2])], 4), cache)
    out = ours.forward(make_batch([Step(prompt[2:], 2, [1, 2])], 4), cache).hidden
    assert relative_error(ours.logits(out), reference_logits(theirs, prompt)[2:]) <= 1e-4


@torch.no_grad()
def check_captured(ours: Target, theirs: Any, norm: Tensor, eps: float) -> None:
    """Boundaries 0..L-1 are transformers' hidden states; L is what the final norm takes."""
    prompt, num_layers = PROMPTS[0], len(ours.params.layers)
    wanted = (num_layers, *range(num_layers))
    batch = make_batch([Step(prompt, 0, [1, 2, 3])], 4)
    out = ours.capture(wanted).forward(batch, ours.new_cache(CacheShape(8, 4, 1, 4)))
    states = theirs(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    for index, stream in zip(wanted[1:], out.aux[1:], strict=True):
        assert relative_error(stream, states[index][0]) <= 1e-5
    last = torch.nn.functional.rms_norm(out.aux[0], norm.shape, norm, eps)
    assert relative_error(last, out.hidden) <= 1e-6


def check_packed(ours: Target, theirs: Any) -> None:
    """Whole texts laid end to end without a cache, as training runs them."""
    texts = [PROMPTS[2], PROMPTS[0], PROMPTS[2][::-1]]
    hidden = packed_forward(ours.params, ours.config, row_of_texts(texts)).hidden
    for text, rows in zip(texts, hidden.split([len(text) for text in texts]), strict=True):
        assert relative_error(ours.logits(rows), reference_logits(theirs, text)) <= 1e-4


def check_bfloat16(exact: Target, rounded: Target, chunk: int) -> None:
    """Hidden states in bf16 stay near those in fp32."""
    shape = CacheShape(40, 4, 4, 1)
    for a, b in zip(
        prefill(exact, PROMPTS, exact.new_cache(shape), 4),
        prefill(rounded, PROMPTS, rounded.new_cache(shape), 4, chunk),
        strict=True,
    ):
        assert b.dtype == torch.bfloat16
        assert relative_error(b.float(), a) < 0.05


def check_greedy_is_unchanged(target: Target, batch: int) -> None:
    """n-gram, oracle, adversary and mixed drafters give plain greedy decoding's tokens."""

    def run(**options: Any) -> list[Any]:
        engine = tiny_engine(target, max_num_seqs=batch, **options)
        return generate(engine, requests(LOSSLESS, max_tokens=16))

    plain = [r.token_ids for r in run()]
    assert [r.token_ids for r in run(propose=ngram, k=3, min_ngram=1, max_ngram=3)] == plain
    texts = {tuple(p): [*p, *ids] for p, ids in zip(LOSSLESS, plain, strict=True)}
    for pattern, k in ((oracle, 3), (adversary, 3), (mixed, 1), (mixed, 4)):
        drafter = scripted(texts, target.vocab_size, pattern)
        results = run(propose=drafter, k=k, verify=rejection)
        assert [r.token_ids for r in results] == plain
        rounds = [r for result in results for r in result.rounds]
        if pattern is oracle:
            assert all(r.accepted == min(r.drafted, r.committed) for r in rounds)
        elif pattern is adversary:
            assert all(r.accepted == 0 and r.committed == 1 for r in rounds)
        else:
            assert len({r.accepted for r in rounds}) > 1
