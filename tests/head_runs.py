"""Tiny pairs of a target and a head, and engines whose drafting is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import head_files as files
import head_reference as reference
import torch
from drafters import mixed, scripted
from running import requests, tiny_engine
from tiny import Step, make_batch, new_cache
from torch import Tensor

from specdec.generate import generate
from specdec.models.batch import Draft, Target
from specdec.models.heads import read_draft
from specdec.models.load import build_target
from specdec.propose import texts_after
from specdec.propose.autoregressive import autoregressive
from specdec.step import Model
from specdec.verify.greedy import greedy

PROMPTS = [[7, 3, 60, 2, 9, 9, 41], [11], list(range(3, 24))]
REDUCED = torch.arange(40) * 2 + torch.arange(40) // 20  # 40 of 101 target ids


class Case(NamedTuple):
    """A head, its target, and what the head should compute."""

    target: files.Config
    head: files.Config
    shapes: files.Shapes
    reference: Callable[..., reference.Reference]
    shares_file: bool = False  # the head lies in the target's own checkpoint

    @property
    def zero_centred(self) -> bool:
        return self.target["model_type"].startswith(("qwen3_next", "qwen3_5"))


def eagle_case(target: files.Config, layers: int = 1) -> Case:
    if target["model_type"] == "llama":
        head = target | {"num_hidden_layers": layers}
        return Case(target, head, files.eagle(head), reference.eagle)
    head = target | {"num_hidden_layers": 1, "architectures": ["EagleQwen3ForCausalLM"]}
    return Case(target, head, files.eagle_qwen3(head), reference.eagle_qwen3)


def eagle3_case(target: files.Config, block: files.Config, layers: int = 1, **more: Any) -> Case:
    head = block | {
        "num_hidden_layers": layers,
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "architectures": ["LlamaForCausalLMEagle3"],
        **more,
    }
    if block["model_type"] == "qwen3":
        head["architectures"] = ["Eagle3Qwen3ForCausalLM"]
    width, shapes = target["hidden_size"], files.eagle3(head, target["hidden_size"])
    if more.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * width,)
    if more.get("fc_norm"):
        shapes |= {f"fc_norm.{j}.weight": (width,) for j in range(3)}
    if block["hidden_size"] != width:
        shapes["embed_tokens.weight"] = (target["vocab_size"], block["hidden_size"])
    return Case(target, head, shapes, reference.eagle3)


def mtp_case(settings: files.Config, layers: int = 1, **more: Any) -> Case:
    kind = settings["model_type"]
    key = "mtp_num_hidden_layers" if kind.startswith("qwen3_5") else "num_nextn_predict_layers"
    settings = settings | {key: layers, **more}
    if kind.startswith("ernie"):
        plain = settings | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        return Case(plain, settings, files.ernie_mtp(settings), reference.ernie_mtp)
    names, straight = {
        "deepseek_v3": (files.deepseek_mtp, reference.deepseek_mtp),
    }.get(kind, (files.qwen_mtp, reference.qwen_mtp))
    return Case(settings, settings, names(settings), straight, shares_file=True)


HEADS = {
    "llama_eagle": eagle_case(files.LLAMA),
    "llama_eagle_2_layers": eagle_case(files.LLAMA, layers=2),
    "qwen3_eagle": eagle_case(files.QWEN3),
    "qwen3_moe_eagle": eagle_case(files.QWEN3_MOE),
    "llama_eagle3": eagle3_case(files.LLAMA, files.LLAMA),
    "llama_eagle3_2_layers": eagle3_case(files.LLAMA, files.LLAMA, layers=2, norm_output=True),
    "llama_eagle3_norms": eagle3_case(
        files.LLAMA, files.LLAMA, norm_before_residual=True, norm_before_fc=True
    ),
    "llama_eagle3_narrow": eagle3_case(
        files.LLAMA, files.LLAMA | {"hidden_size": 24}, target_hidden_size=32, fc_norm=True
    ),
    "llama_eagle3_for_qwen3": eagle3_case(files.QWEN3, files.LLAMA),
    "qwen3_eagle3": eagle3_case(files.QWEN3, files.QWEN3),
    "qwen3_next_mtp": mtp_case(files.QWEN3_NEXT),
    "qwen3_next_mtp_2_layers": mtp_case(files.QWEN3_NEXT, layers=2),
    "qwen_mtp": mtp_case(files.QWEN3_5),
    "deepseek_mtp": mtp_case(files.DEEPSEEK),
    "deepseek_mtp_2_layers": mtp_case(files.DEEPSEEK, layers=2),
    "deepseek_mtp_3_layers": mtp_case(files.DEEPSEEK, layers=3),
    "ernie_mtp": mtp_case(files.ERNIE),
}


class Pair(NamedTuple):
    target: Target
    draft: Draft
    straight: reference.Reference
    target_state: dict[str, Tensor]
    head_state: dict[str, Tensor]


def head_state(case: Case, seed: int = 1) -> dict[str, Tensor]:
    state = files.random_state(case.shapes, seed, zero_centred=case.zero_centred)
    if "lm_head.weight" in state:
        state["d2t"] = REDUCED - torch.arange(40)
        state["t2d"] = torch.zeros(case.target["vocab_size"], dtype=torch.bool)
        state["t2d"][REDUCED] = True
    return state


def load(case: Case, **options: Any) -> Pair:
    """Target and head through the loaders, with the straight-line head of the same tensors.

    Options are `read_draft`'s; `straight` ones go to the reference, `device` to the loaders.
    """
    straight, device = options.pop("straight", {}), options.pop("device", "cpu")
    shapes = files.target(case.target)
    target_state = files.random_state(shapes, zero_centred=case.zero_centred)
    state = head_state(case)
    stored = files.checkpoint(target_state | state if case.shares_file else target_state)
    target = build_target(stored, case.target, device=device)
    head_file = stored if case.shares_file else files.checkpoint(state)
    draft = read_draft(head_file, case.head, target, **options)
    embed = state.get("embed_tokens.weight", target_state["model.embed_tokens.weight"])
    lm_head = state.get("lm_head.weight", target_state["lm_head.weight"])
    head = case.reference(state, case.head, embed, lm_head, **straight)
    return Pair(target, draft, head, target_state, state)


class Drafted(NamedTuple):
    """One request's drafting in one step."""

    text: list[int]  # committed by then
    drafts: list[int]
    logits: list[Tensor]  # of each draft step, [V_draft]


def record(
    target: Target, draft: Draft, k: int, *, prompts: Sequence[list[int]] = PROMPTS, **options: Any
) -> list[Drafted]:
    """Runs an engine whose rounds keep 0, 1, .. K drafts in turn, and writes down what the head
    drafts after each of them: what it proposes is replaced by right and wrong tokens.

    Args:
        counts: how many to draft in each step, in turn, instead of always k.
        watch: called with the engine at the end.
    """
    max_tokens, counts = options.pop("max_tokens", 14), options.pop("counts", [k])
    watch = options.pop("watch", lambda engine: None)
    plain = generate(
        tiny_engine(target, eos=(), **options), requests(prompts, max_tokens=max_tokens)
    )
    texts = {tuple(p): [*p, *r.token_ids] for p, r in zip(prompts, plain, strict=True)}
    follow = scripted(texts, target.vocab_size, mixed)
    calls, seen, steps = [], [], count()

    def logits(hidden: Tensor, step: int) -> Tensor:
        calls.append(draft.logits(hidden, step))
        return calls[-1]

    def propose(state, batch, committed, out, model, *, num_draft_tokens, **keywords):
        num_draft_tokens = min(num_draft_tokens, counts[next(steps) % len(counts)])
        calls.clear()
        listening = Model(draft._replace(logits=logits), model.cache)
        own = autoregressive(
            state, batch, committed, out, listening, num_draft_tokens=num_draft_tokens, **keywords
        )
        after = texts_after(state, batch, committed).tolist()
        for r, text in enumerate(after):
            if committed.num_committed[r] > 0:
                text = text[: int(committed.num_tokens[r])]
                seen.append(Drafted(text, own.token_ids[r].tolist(), [c[r] for c in calls]))
        return follow(
            state, batch, committed, out, model, num_draft_tokens=num_draft_tokens, **keywords
        )

    engine = tiny_engine(target, draft, propose, greedy, k=k, eos=(), **options)
    results = generate(engine, requests(prompts, max_tokens=max_tokens))
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    watch(engine)
    kept = [r.accepted for result in results for r in result.rounds]
    assert len(set(kept)) > 1 or len(kept) < 4
    return seen


def features(target: Target, draft: Draft, text: list[int]) -> tuple[Tensor, list[Tensor]]:
    """The target's hidden states and auxiliary streams of a whole text, in a cache of its own."""
    target = target.capture(draft.aux_layers)
    blocks = list(range(1, len(text) // 4 + 2))
    batch = make_batch([Step(text, 0, blocks)], 4)
    out = target.forward(batch, new_cache(target, len(blocks) + 1, 4, window=len(text)))
    return out.hidden, list(out.aux)


def check(pair: Pair, drafted: Drafted, tolerance: float = 1e-4) -> None:
    """The head's logits of a round equal the straight-line head's."""
    hidden, aux = features(pair.target, pair.draft, drafted.text[:-1])
    expected = reference.draft_logits(pair.straight, drafted.text, hidden, aux, drafted.drafts)
    for step, (ours, theirs) in enumerate(zip(drafted.logits, expected, strict=True)):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error <= tolerance, f"draft step {step} after {len(drafted.text)} ids: {error:.2e}"
