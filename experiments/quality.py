"""What a small pair is worth: its English, and the acceptance of its head beside n-gram drafts.

    python experiments/quality.py target.path=run/target draft.path=run/head \
        text.heldout_path=data/small/heldout text.words_path=data/small/words.txt
    python experiments/quality.py target=deepseek_mtp draft=deepseek_mtp  # without these texts

The run folder gets `quality.json` and `samples.txt`.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specdec.checks import check_values, plain
from specdec.experiments.acceptance import load_prompts
from specdec.experiments.jobs import hydra_script, write_json
from specdec.training.pair_config import register

register()


def quality(cfg: DictConfig, folder: Path) -> float | None:
    """One run. Returns the acceptance length on held-out prompts."""
    from specdec.build import build_stages, load_models
    from specdec.experiments.tables import number, print_table
    from specdec.runtime import use_threads

    check_values(cfg)
    began = time.perf_counter()
    models = load_models(cfg, uses_draft=True)
    use_threads(cfg.num_threads, models.target)
    stages, rival = build_stages(cfg), build_stages(changed(cfg, propose=plain(cfg.rival)))
    prompts, builtin = load_prompts(cfg), load_prompts(changed(cfg, data=plain(cfg.builtin)))
    known = words(cfg)
    bits = heldout_bits(cfg, models)
    short = changed(cfg, sampling={**plain(cfg.sampling), "max_tokens": cfg.builtin_max_tokens})
    result: dict[str, Any] = {
        "heldout": compare(cfg, models, stages, rival, prompts),
        "builtin": compare(short, models, stages, rival, builtin),
        "bits_per_byte": bits,
        "samples": sampled(cfg, models, prompts, folder, known),
        "dtype": str(models.dtype).removeprefix("torch."),
        "device": str(models.device),
        "num_draft_tokens": stages.num_draft_tokens,
        "seconds": time.perf_counter() - began,
        "config": plain(cfg),
    }
    write_json(folder / "quality.json", result)
    rows = [["held-out bits a byte", number(result["bits_per_byte"])]]
    for name in ("heldout", "builtin"):
        found = result[name]
        rows.append([f"acceptance length, {name}", number(found["acceptance_length"])])
        rows.append([f"  less n-gram's, {name}", number(found["above_ngram"])])
    for name, value in result["samples"].items():
        shown = ", ".join(map(number, value)) if isinstance(value, list) else number(value)
        rows.append([f"samples: {name}", shown])
    print_table(str(cfg.target.path), ["", ""], rows)
    print(f"results: {folder}")
    return result["heldout"]["acceptance_length"]


def changed(cfg: DictConfig, **nodes: Any) -> DictConfig:
    """The configuration with other nodes, without its types."""
    return OmegaConf.create({**plain(cfg), **nodes})


def compare(cfg: DictConfig, models: Any, stages: Any, rival: Any, prompts: Any) -> dict[str, Any]:
    """Acceptance of the head and of the rival on the same prompts, and their difference with its
    paired 95% interval."""
    from specdec import metrics
    from specdec.experiments.decoding import decode_prompts

    names = (
        *("acceptance_length", "acceptance_length_ci95", "per_position_joint"),
        *("per_position_conditional", "bytes_per_round", "repeated_8gram_share", "num_prompts"),
    )
    decoded = [decode_prompts(cfg, models, s, prompts).outputs for s in (stages, rival)]
    own, other = (metrics.summarize(outputs, stages.num_draft_tokens) for outputs in decoded)
    pairs = []
    for outputs in decoded:
        counts = metrics.by_prompt(outputs).values()
        pairs.append(([c.committed for c in counts], [c.rounds for c in counts]))
    difference, low, high = metrics.paired_difference(*pairs)
    alike = [a.token_ids == b.token_ids for a, b in zip(*decoded, strict=True)]
    return {
        **{name: own[name] for name in names},
        "ngram_acceptance_length": other["acceptance_length"],
        "above_ngram": difference,
        "above_ngram_ci95": [low, high],
        "same_texts": sum(alike) / len(alike),
    }


def heldout_bits(cfg: DictConfig, models: Any) -> float | None:
    """Bits a byte of the held-out answers; None where they are not at hand."""
    import torch

    from specdec.experiments.targets import packed_forward
    from specdec.experiments.training import heldout_rows
    from specdec.training.packing import to_device
    from specdec.training.pretraining import bits_per_byte
    from specdec.training.tokenizer import bytes_of_ids

    if cfg.text.heldout_path is None:
        return None
    target = models.target
    rows = [to_device(row, models.device) for row in heldout_rows(cfg.text, target.vocab_size)]
    return bits_per_byte(
        lambda row: packed_forward(target.params, target.config, row).hidden,
        target.lm_head,
        rows,
        torch.tensor(bytes_of_ids(models.tokenizer.backend_tokenizer)),
    )


def words(cfg: DictConfig) -> set[str] | None:
    """The words of the training text; None where they are not at hand."""
    if cfg.text.words_path is None:
        return None
    return set(Path(cfg.text.words_path).read_text(encoding="utf-8").split())


def sampled(
    cfg: DictConfig, models: Any, prompts: Any, folder: Path, known: set[str] | None = None
) -> dict[str, Any]:
    """Plainly sampled answers, to each prompt in turn until there are enough: the share of their
    words that the training text has, and of their 8-grams that repeat an earlier one of the same
    answer."""
    from specdec import metrics
    from specdec.build import plain_stages
    from specdec.experiments.decoding import decode_prompts
    from specdec.prompts.records import PromptSet

    text = cfg.text
    few = PromptSet(prompts.name, prompts.prompts[: text.num_samples], prompts.turns)
    sampling = {
        **plain(cfg.sampling),
        "temperature": text.temperature,
        "max_tokens": text.max_tokens,
        "num_samples": -(-text.num_samples // len(few.prompts)),
    }
    cfg = changed(cfg, sampling=sampling)
    decoded = decode_prompts(cfg, models, plain_stages(cfg), few)
    asked = [p.turns[0] for p in few.prompts for _ in range(sampling["num_samples"])]
    lines = [f"> {prompt}\n{t}\n" for prompt, t in zip(asked, decoded.texts, strict=True)]
    (folder / "samples.txt").write_text("\n".join(lines), encoding="utf-8")
    share, unknown = None, []
    if known is not None:
        share, unknown = known_words(decoded.texts, known)
    found = metrics.summarize(decoded.outputs, 0)
    return {
        "known_word_share": share,
        "unknown_words": ", ".join(unknown[:20]),
        **{name: found[name] for name in ("repeated_8gram_share", "repeated_8gram_share_ci95")},
        "num_samples": len(asked),
        "ended_share": sum(o.finish_reason == "stop" for o in decoded.outputs) / len(asked),
    }


def known_words(texts: Sequence[str], known: set[str]) -> tuple[float | None, list[str]]:
    """Share of the texts' words that are in `known`, and the others in order."""
    from specdec.experiments.retokenize import words_of

    words = [word for text in texts for word in words_of(text)]
    unknown = [word for word in words if word not in known]
    return (1 - len(unknown) / len(words) if words else None), list(dict.fromkeys(unknown))


main = hydra_script("quality")(quality)

if __name__ == "__main__":
    main()
