"""From a configuration to bound stages, loaded models and an engine."""

import gc
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf

from specdec import runtime
from specdec.bind import bind
from specdec.cache import blocks_for
from specdec.checks import NO_PROPOSAL, plain
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.models.batch import CacheShape, Draft, Target
from specdec.models.load import load_draft, load_target
from specdec.models.tokenizer import check_same_tokenizer, eos_token_ids, load_tokenizer
from specdec.schedule import Limits
from specdec.step import Stages
from specdec.verify import traits_of

STAGE_ARGS = {
    "schedule": ("requests", "limits"),
    "verify": ("dist", "drafts", "keys"),
    "postprocess": ("state", "batch", "verification"),
    "propose": ("state", "batch", "committed", "out", "draft"),
}


class BoundStages(NamedTuple):
    """The four stages and what the engine has to know about them."""

    stages: Stages
    num_draft_tokens: int
    draft_sampling: str  # greedy | sample | shared
    uses_draft: bool | None  # None: the proposer does not say


class Models(NamedTuple):
    target: Target
    draft: Draft | None
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype


def build_stages(cfg: DictConfig) -> BoundStages:
    """Bind the four stages; `propose.draft_sampling=auto` becomes what the rule's traits ask for.

    Raises:
        ConfigError: see `bind`; also for a rule that is right at temperature 0 only, above it.
    """
    verify = bind(cfg.verify, fn_args=STAGE_ARGS["verify"], key="verify")
    temperature = cfg.sampling.temperature
    if temperature > 0 and traits_of(verify).greedy_only:
        rule = cfg.verify._target_.rpartition(".")[2]
        raise ConfigError(
            f"verify={rule} cannot run with sampling.temperature={temperature}; "
            "use verify=rejection, which is exactly greedy at temperature 0"
        )
    postprocess = bind(cfg.postprocess, fn_args=STAGE_ARGS["postprocess"], key="postprocess")
    num_draft_tokens = 0 if cfg.propose._target_ == NO_PROPOSAL else cfg.propose.num_draft_tokens
    sampling = _draft_sampling(verify, cfg.propose.draft_sampling)
    # Left at their defaults these are conveniences, which a proposer of one's own may lack.
    offered = {"draft_sampling": sampling, "temperature": cfg.propose.temperature}
    node = plain(cfg.propose)
    node["num_draft_tokens"] = num_draft_tokens
    for name, neutral in (("draft_sampling", "auto"), ("temperature", None)):
        if node[name] == neutral:
            del node[name]
    propose = bind(node, fn_args=STAGE_ARGS["propose"], offered=offered, key="propose")
    schedule = bind(
        cfg.schedule,
        fn_args=STAGE_ARGS["schedule"],
        offered={"num_draft_tokens": num_draft_tokens},
        key="schedule",
    )
    stages = Stages(schedule, verify, postprocess, propose)
    uses_draft = getattr(propose.func, "uses_draft", None)
    return BoundStages(stages, num_draft_tokens, sampling, uses_draft)


def _draft_sampling(verify: partial, asked: str) -> str:
    traits = traits_of(verify)
    if asked != "auto":
        if traits.noise == "shared":
            raise ConfigError(
                f"verify.noise=shared hands the drafter the target's noise; "
                f"propose.draft_sampling={asked} contradicts it, use auto"
            )
        return asked
    if traits.noise == "shared":
        return "shared"
    return "sample" if traits.wants_draft_probs else "greedy"


def plain_stages(cfg: DictConfig) -> BoundStages:
    """The same stages without drafts, for the baseline."""
    untyped = OmegaConf.create(plain(cfg))
    untyped.propose = {
        "_target_": NO_PROPOSAL,
        "num_draft_tokens": 0,
        "draft_sampling": "auto",
        "temperature": None,
    }
    return build_stages(untyped)


def load_models(cfg: DictConfig, *, uses_draft: bool | None) -> Models:
    """Load what a run needs. Jobs of one process share the target and the draft.

    Args:
        uses_draft: False leaves the draft out, True requires one, None loads one where
            `draft.path` is set.

    Raises:
        ConfigError: a draft is required and `draft.path` is null.
        CheckpointError: see `load_target` and `load_draft`.
    """
    device = runtime.pick_device(cfg.device)
    dtype = runtime.pick_dtype(cfg.dtype, device)
    target_key = (cfg.target.path, device, dtype, cfg.target.family, cfg.target.quantize)
    if uses_draft and cfg.draft.path is None:
        raise ConfigError(
            "propose=autoregressive drafts with a head and draft.path is null; "
            "set draft.path, or use propose=ngram or propose=none"
        )
    target = _target(*target_key)
    draft = None
    if uses_draft is not False and cfg.draft.path is not None:
        keywords = plain(cfg.draft)
        changed = {name: value for name, value in keywords["axes"].items() if value is not None}
        keywords["axes"] = tuple(changed.items())
        draft = _draft(target_key, tuple(sorted(keywords.items())))
    tokenizer = _tokenizer(cfg.target.path)
    gc.freeze()  # a full collection over imported modules would stall steps of many requests
    return Models(target, draft, tokenizer, _eos_ids(cfg.target.path), device, dtype)


@lru_cache(maxsize=1)
def _target(
    path: str, device: torch.device, dtype: torch.dtype, family: str | None, quantize: str
) -> Target:
    return load_target(path, device=device, dtype=dtype, family=family, quantize=quantize)


@lru_cache(maxsize=2)
def _draft(target_key: tuple, keywords: tuple[tuple[str, Any], ...]) -> Draft:
    _, device, dtype, *_ = target_key
    options = dict(keywords)
    path, options["axes"] = options.pop("path"), dict(options["axes"])
    check_same_tokenizer(target_key[0], path)
    return load_draft(path, _target(*target_key), device=device, dtype=dtype, **options)


@lru_cache(maxsize=2)
def _tokenizer(path: str) -> Any:
    return load_tokenizer(path)


@lru_cache(maxsize=2)
def _eos_ids(path: str) -> tuple[int, ...]:
    return tuple(eos_token_ids(path))


def context_length(cfg: DictConfig, models: Models) -> int:
    """The longest prompt + output that this target and configuration allow.

    A draft made for fewer positions does not shorten it: the engine warns of such requests.
    """
    limit = models.target.max_position
    asked = cfg.cache.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(
            f"cache.max_model_len={asked} exceeds the {limit} positions of the model; lower it"
        )
    return asked or limit


def build_engine(
    cfg: DictConfig,
    models: Models,
    bound: BoundStages,
    *,
    longest: int,
    num_requests: int,
    penalties: bool = False,
) -> Engine:
    """An engine with room for `longest` tokens a request.

    Args:
        longest: prompt + output of the longest request; cut to the context's length.
        num_requests: no more slots than this are reserved.
        penalties: requests may have some; see `Engine`.
    """
    max_model_len = min(longest, context_length(cfg, models))
    num_seqs = max(1, min(cfg.schedule.max_num_seqs, num_requests))
    block_size = cfg.cache.block_size
    per_request = blocks_for(max_model_len + bound.num_draft_tokens, block_size)
    draft = models.draft if bound.uses_draft is not False else None
    shape = CacheShape(1, block_size, num_seqs + 1, bound.num_draft_tokens + 1)
    fit = runtime.blocks_that_fit(models.target, draft, shape, models.device)
    num_blocks = cfg.cache.num_blocks
    if num_blocks is None:
        num_blocks = min(num_seqs * per_request + 1, max(fit, per_request + 1))
    if num_blocks * runtime.CACHE_SHARE > fit:
        raise ConfigError(
            f"cache.num_blocks={num_blocks} of {block_size} tokens do not fit the free memory of "
            f"{models.device}, which holds {int(fit / runtime.CACHE_SHARE)}; lower it, or "
            "cache.max_model_len or sampling.max_tokens"
        )
    limits = Limits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=cfg.schedule.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        max_draft_tokens=bound.num_draft_tokens,
    )
    kernels = runtime.pick_kernels(cfg.kernels.backend, models.device)
    on_gpu, graphs, overlap = models.device.type == "cuda", cfg.kernels.graphs, cfg.kernels.overlap
    return Engine(
        models.target,
        draft,
        bound.stages,
        limits,
        eos_token_ids=models.eos_token_ids,
        draft_sampling=bound.draft_sampling,
        penalties=penalties,
        kernels=kernels,
        graphs=on_gpu and kernels == "triton" if graphs is None else graphs,
        overlap=on_gpu if overlap is None else overlap,
    )
