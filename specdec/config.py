"""Typed keys of the Hydra configuration. Nothing heavy is imported here: `--help` stays fast.

Each group file in conf/ lists its schema from here in its defaults, so that a misspelled key or a
value of the wrong type is refused while the configuration is composed.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class TargetConfig:
    path: str = MISSING  # folder, GGUF file, package:DISTRIBUTION/FILE, or pretrained/NAME
    family: str | None = None  # null: from the checkpoint's own config
    quantize: str = "none"  # none | fp8 | int8 | int4: what its layers' matrices are kept in


@dataclass
class AxesConfig:
    """Changes to the row of axes of the draft head's family (`specdec.models.axes`)."""

    fusion: str | None = None
    block: str | None = None
    residual: str | None = None
    position0_embedding: str | None = None
    depth_rule: str | None = None
    depth_owns: str | None = None
    first_input_norm: bool | None = None
    final_norm: bool | None = None
    recycle: str | None = None
    embed: str | None = None
    lm_head: str | None = None
    input_features: str | None = None
    aux_norm: str | None = None


@dataclass
class DraftConfig:
    path: str | None = None  # null: no draft head
    family: str | None = None  # null: from the checkpoint's own config
    axes: AxesConfig = field(default_factory=AxesConfig)  # null: as in the family's row
    logits_from: str = "shared"
    num_draft_rows: int | None = None


@dataclass
class StageConfig:
    """A function and its keywords; keys beyond the schema must be keywords of `_target_`."""

    _target_: str = MISSING
    _partial_: bool = True


@dataclass
class ScheduleConfig(StageConfig):
    _target_: str = "specdec.schedule.schedule"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048


@dataclass
class VerifyConfig(StageConfig):
    pass


@dataclass
class GumbelConfig(VerifyConfig):
    noise: str = "independent"


@dataclass
class SyntheticConfig(VerifyConfig):
    rule: str = "rejection"
    accepted: float = 2.0
    rates: list[float] | None = None


@dataclass
class PostprocessConfig(StageConfig):
    _target_: str = "specdec.postprocess.postprocess"


@dataclass
class ProposeConfig(StageConfig):
    num_draft_tokens: int = 4
    draft_sampling: str = "auto"
    temperature: float | None = None  # of q; null: the request's own


@dataclass
class NgramConfig(ProposeConfig):
    min_ngram: int = 2
    max_ngram: int = 4


@dataclass
class SamplingConfig:
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of ids in the prompt or the output; 1: off
    presence_penalty: float = 0.0  # of ids in the output; 0: off, as the next one
    frequency_penalty: float = 0.0
    max_tokens: int = 128
    seed: int = 0
    ignore_eos: bool = False
    num_samples: int = 1


@dataclass
class CacheConfig:
    block_size: int = 16
    num_blocks: int | None = None  # null: enough for max_num_seqs full requests, if memory allows
    max_model_len: int | None = None  # null: what the prompts and max_tokens need


@dataclass
class KernelsConfig:
    backend: str = "torch"
    graphs: bool | None = None  # each step as one CUDA graph; null: where Triton runs on a GPU
    overlap: bool | None = None  # launch a step before the last one is read; null: on a GPU


@dataclass
class DataConfig(StageConfig):
    path: str | None = None  # the file of a set that is not built in
    num_prompts: int | None = None  # null: all; else stratified by category
    turns: str = "first"
    system_prompt: str | None = None  # null: the model's own
    chat_template: str | None = None  # null: the model's own


@dataclass
class LoggerConfig(StageConfig):
    pass


@dataclass
class WandbConfig(LoggerConfig):
    project: str = "specdec"
    entity: str | None = None
    mode: str | None = None  # null: WANDB_MODE, else online with a key, else offline
    tags: list[str] = field(default_factory=list)


@dataclass
class AcceptanceConfig:
    """Keys of `experiments/acceptance.py`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    postprocess: PostprocessConfig = field(default_factory=PostprocessConfig)
    propose: ProposeConfig = field(default_factory=ProposeConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None  # null: OMP_NUM_THREADS, else the faster of one and all
    seed: int = 0
    measure_baseline: bool = False


@dataclass
class ArrivalsConfig:
    batch: int | None = None  # requests at a time to aim at, on average; null: no such run
    num_requests: int = 400
    attempts: int = 5  # at finding the rate


@dataclass
class SpeedConfig:
    """Keys of `experiments/speed.py`."""

    shape: dict[str, Any] = field(default_factory=dict)  # of the target, a config.json
    draft_shape: dict[str, Any] = field(default_factory=dict)  # of the head; empty: the target's
    vocab_size: int | None = None  # null: the shape's own
    quantize: str = "none"  # as target.quantize
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    postprocess: PostprocessConfig = field(default_factory=PostprocessConfig)
    propose: ProposeConfig = field(default_factory=ProposeConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    batch_sizes: list[int] = field(default_factory=list)
    prompt_tokens: int = 128
    repeats: int = 3  # passes whose steps are timed
    num_profiled: int = 20  # steps; 0: no profile
    measure_parts: bool = True
    arrivals: ArrivalsConfig = field(default_factory=ArrivalsConfig)
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    seed: int = 0


@dataclass
class SweepConfig:
    """Keys of `experiments/sweep.py`."""

    dir: str = MISSING


@dataclass
class CompareConfig:
    """Keys of `experiments/compare.py`."""

    runs: Any = MISSING  # a path or glob, or a list of them
    filter: Any = None  # values, or lists of them, by configuration key


SCHEMAS: dict[str, type] = {
    "acceptance": AcceptanceConfig,
    "target": TargetConfig,
    "draft": DraftConfig,
    "schedule": ScheduleConfig,
    "verify": VerifyConfig,
    "gumbel": GumbelConfig,
    "synthetic": SyntheticConfig,
    "postprocess": PostprocessConfig,
    "propose": ProposeConfig,
    "ngram": NgramConfig,
    "sampling": SamplingConfig,
    "cache": CacheConfig,
    "kernels": KernelsConfig,
    "data": DataConfig,
    "logger": LoggerConfig,
    "wandb": WandbConfig,
    "speed": SpeedConfig,
    "sweep": SweepConfig,
    "compare": CompareConfig,
}


def register_schemas(schemas: dict[str, Any] = SCHEMAS) -> None:
    """Make each schema listable as `/schema/NAME@_here_` in a defaults list."""
    store = ConfigStore.instance()
    for name, schema in schemas.items():
        store.store(group="schema", name=name, node=schema)
