"""Batch-1 speed beside `transformers`' own `generate` on the same weights, interleaved in one run.

    python experiments/peers.py propose.num_draft_tokens=3 data.num_prompts=8 sampling.max_tokens=64

Each prompt is decoded by every contender in turn, in an order that rotates; the figures are medians
over prompts. `summary.json` goes to the run folder. Keys are those of `experiments/acceptance.py`.
"""

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specdec.checks import check_values
from specdec.experiments.jobs import hydra_script, write_json


@hydra_script("config")
def main(cfg: DictConfig, folder: Path) -> float:
    """One comparison. Returns plain decoding's speed over that of transformers."""
    import torch

    from specdec.build import build_stages, load_models, plain_stages
    from specdec.experiments.acceptance import load_prompts
    from specdec.experiments.decoding import turn_tasks, warm_engine
    from specdec.experiments.tables import number, print_table
    from specdec.generate import generate
    from specdec.runtime import device_name, use_threads
    from specdec.schedule import Request

    check_values(cfg)
    stages = {"plain": plain_stages(cfg), "speculative": build_stages(cfg)}
    prompts = load_prompts(cfg)
    models = load_models(cfg, uses_draft=stages["speculative"].uses_draft)
    num_threads = use_threads(cfg.num_threads, models.target)
    theirs = transformers_model(cfg.target.path, models.dtype, models.device)
    asked = [
        replace(task.request, ignore_eos=True) for task in turn_tasks(cfg, models, prompts, 0, {})
    ]
    engines = {name: warm_engine(cfg, models, bound, asked) for name, bound in stages.items()}

    def ours(name: str, request: Request) -> list[int]:
        return list(generate(engines[name], [request])[0].token_ids)

    @torch.inference_mode()
    def peer(_: str, request: Request) -> list[int]:
        ids = torch.tensor([request.prompt_ids], device=models.device)
        n = request.max_tokens
        out = theirs.generate(ids, do_sample=False, max_new_tokens=n, min_new_tokens=n)
        return out[0, ids.shape[1] :].tolist()

    contenders = {"transformers": peer, "plain": ours, "speculative": ours}
    peer("", Request(asked[0].prompt_ids, 4))
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    same = 0
    for turn, request in enumerate(asked):
        names = list(contenders)
        texts = {}
        for name in names[turn % 3 :] + names[: turn % 3]:
            began = time.perf_counter()
            texts[name] = contenders[name](name, request)
            rates[name].append(len(texts[name]) / (time.perf_counter() - began))
        same += texts["plain"] == texts["transformers"]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    summary = {
        "tokens_per_second": medians,
        "plain_over_transformers": ratio(rates, "plain", "transformers"),
        "speculative_over_plain": ratio(rates, "speculative", "plain"),
        "num_prompts": len(asked),
        "texts_equal_to_transformers": same,
        "num_draft_tokens": stages["speculative"].num_draft_tokens,
        "num_draft_rows": cfg.draft.num_draft_rows,
        "dtype": str(models.dtype).removeprefix("torch."),
        "device_name": device_name(models.device),
        "num_threads": num_threads,
    }
    write_json(folder / "summary.json", summary)
    rows = [(name, number(value, 1)) for name, value in medians.items()]
    rows.append(("plain / transformers", number(summary["plain_over_transformers"], 2)))
    rows.append(("speculative / plain", number(summary["speculative_over_plain"], 2)))
    print_table("batch 1", ("", "tokens a second (median)"), rows)
    return summary["plain_over_transformers"]


def ratio(rates: dict[str, list[float]], a: str, b: str) -> float:
    """Median over prompts of a's rate over b's on the same prompt, taken side by side."""
    return statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))


def transformers_model(path: str, dtype: Any, device: Any) -> Any:
    """`LlamaForCausalLM` over the tensors that our own loader reads."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from specdec.models.load import open_checkpoint, read_config, resolve_path

    where = resolve_path(path)
    config = LlamaConfig(**read_config(where), dtype=dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {
        name: tensor.to(device, dtype) for name, tensor in dict(open_checkpoint(where)).items()
    }
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


if __name__ == "__main__":
    main()
