"""Model cards of small pairs, from what their runs measured."""

import json
from collections.abc import Mapping
from typing import Any

TITLES = {
    "llama_eagle3": "A Llama target with an Eagle-3 head of a reduced vocabulary",
    "qwen3_eagle": "A Qwen3 target with an Eagle head",
    "qwen3_moe_eagle": "A Qwen3-MoE target with an Eagle head that has experts too",
    "qwen3_next_mtp": "A Qwen3-Next target (three DeltaNet layers to one of attention) with a "
    "multi-token prediction head",
    "deepseek_mtp": "A DeepSeek-V3 target (latent attention, grouped experts) with a multi-token "
    "prediction head",
}

CARD = """---
license: apache-2.0
language: en
---
# {pair}

{title}.
{target_parameters:,} and {head_parameters:,} parameters, a vocabulary of {vocab_size} byte-level
BPE ids. It writes short stories and short answers in simple English, so that every family can be
run on a laptop. It knows nothing worth asking for.

    python experiments/acceptance.py model={pair} propose.num_draft_tokens=3

## Training

* Text: {tokens:,} tokens ({answer_bytes:,} bytes of answers to {prompts:,} prompts) written by
  SmolLM2-135M-Instruct through this project's engine (`conf/experiment/stories.yaml`). Prompts come
  from templates in simple words; {heldout:,} answers are held out, by prompt.
* Target: `conf/experiment/{pair}_target.yaml`, {target_passes:,} token-passes ({epochs:.1f}
  epochs) in {target_seconds:.0f} s on {device}.
* Head: `conf/experiment/{pair}_head.yaml`, {head_passes:,} token-passes in {head_seconds:.0f} s,
  unrolled for {unroll} steps on the same text.

## Measured

Greedy drafting and decoding with K = {k} in {dtype}; intervals are 95%, by bootstrap over prompts.

| | |
|---|---|
| held-out text | {bits} bits a byte |
| acceptance length, held-out prompts of its own kind ({heldout_prompts}) | {own} |
| more than n-gram drafts there ({ngram}), paired | {above} |
| acceptance length, `data=builtin`, {builtin_tokens} tokens ({builtin_prompts}) | {builtin} |
| kept by position, held-out prompts | {positions} |
| repeated 8-grams of the greedy texts: held-out prompts, `data=builtin` | {loops} |
| words of {num_samples} samples at temperature {temperature} that the training text has | {known} |
| repeated 8-grams in them | {repeated} [{repeated_low}, {repeated_high}] |

So small a target loops when it decodes greedily, and a loop is easy for every drafter, n-grams too.

Chat template: `<|user|>text<|end|><|assistant|>answer<|end|>`. Positions past some 400 tokens were
not trained.
"""


def model_card(pair: str, records: Mapping[str, Mapping[str, Any]]) -> str:
    """The card's text.

    Args:
        records: what the stages left: "data", "pretrain", "head" and "quality".
    """
    data, target, head, quality = (records[n] for n in ("data", "pretrain", "head", "quality"))
    own, builtin, samples = quality["heldout"], quality["builtin"], quality["samples"]
    text = quality["config"]["text"]
    return CARD.format(
        pair=pair,
        title=TITLES.get(pair, "A small target with a draft head"),
        target_parameters=target["parameters"],
        head_parameters=head["parameters"],
        vocab_size=data["train"]["vocab_size"],
        tokens=data["train"]["num_tokens"],
        answer_bytes=data["train"]["answer_bytes"],
        prompts=data["prompts"],
        heldout=data["heldout"]["num_samples"],
        target_passes=target["tokens"],
        epochs=target["epochs"],
        target_seconds=target["seconds"],
        device=target["device_name"],
        head_passes=head["tokens"],
        head_seconds=head["seconds"],
        unroll=head["config"]["unroll"]["num_steps"],
        k=quality["num_draft_tokens"],
        dtype=quality["dtype"],
        bits=_number(quality["bits_per_byte"]),
        own=_with_interval(own["acceptance_length"], own["acceptance_length_ci95"]),
        heldout_prompts=own["num_prompts"],
        ngram=_number(own["ngram_acceptance_length"]),
        above=_with_interval(own["above_ngram"], own["above_ngram_ci95"]),
        builtin=_with_interval(builtin["acceptance_length"], builtin["acceptance_length_ci95"]),
        builtin_prompts=builtin["num_prompts"],
        builtin_tokens=quality["config"]["builtin_max_tokens"],
        positions=", ".join(map(_number, own["per_position_joint"])),
        loops=", ".join(_percent(found["repeated_8gram_share"]) for found in (own, builtin)),
        num_samples=samples["num_samples"],
        temperature=json.dumps(text["temperature"]),
        known=_percent(samples["known_word_share"]),
        repeated=_percent(samples["repeated_8gram_share"]),
        repeated_low=_percent(samples["repeated_8gram_share_ci95"][0]),
        repeated_high=_percent(samples["repeated_8gram_share_ci95"][1]),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _with_interval(value: float | None, interval: list[float | None]) -> str:
    low, high = map(_number, interval)
    return f"{_number(value)} [{low}, {high}]"
