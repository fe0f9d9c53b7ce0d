"""Typed keys of the scripts that make small pairs; see specdec/config.py."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from specdec.config import (
    CacheConfig,
    DataConfig,
    DraftConfig,
    KernelsConfig,
    LoggerConfig,
    PostprocessConfig,
    ProposeConfig,
    SamplingConfig,
    ScheduleConfig,
    TargetConfig,
    VerifyConfig,
    register_schemas,
)
from specdec.training import config
from specdec.training.config import (
    BudgetConfig,
    LrScheduleConfig,
    OptimizerConfig,
    TrainDataConfig,
)


@dataclass
class SourceConfig:
    paths: list[str] = field(default_factory=list)  # folders that generate.py wrote
    tokenizer: str = MISSING  # of the model that wrote them


@dataclass
class RetokenizeConfig:
    """Keys of `experiments/retokenize.py`."""

    source: SourceConfig = field(default_factory=SourceConfig)
    path: str | None = None  # folder to write; null: `data` in the run folder
    tokenizer: str | None = None  # folder of a tokenizer to use; null makes one
    vocab_size: int = 2048
    bpe_chars: int = 40_000_000  # of text that the tokenizer is made from
    heldout_share: float = 0.02  # of the prompts


@dataclass
class BalanceConfig:
    """How experts are kept in use."""

    loss: float = 0.01  # weight of the balance loss, for routers of softmax
    rate: float = 0.001  # by which DeepSeek's correction biases move a step


@dataclass
class PretrainConfig:
    """Keys of `experiments/pretrain.py`."""

    shape: dict[str, Any] = field(default_factory=dict)  # a config.json without vocabulary and ids
    tokenizer: str = MISSING  # folder, copied beside the weights
    train_data: TrainDataConfig = field(default_factory=TrainDataConfig)
    heldout_path: str | None = None  # a data set that is not trained on
    heldout_tokens: int | None = 500_000  # of it, supervised; null: all
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    eval_every: int | None = None  # steps; null: at the end only
    accumulation: int = 1  # rows an optimiser step
    clip_norm: float = 1.0
    average_decay: float = 0.998  # of the weights that are evaluated and saved; 0: no average
    log_every: int = 50  # steps
    save_every: int | None = None  # steps between states for resuming; null: at the end
    resume: str | None = None  # run folder to go on from, with its overrides
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    seed: int = 0


@dataclass
class TextConfig:
    """How a model's English is judged."""

    heldout_path: str | None = None  # a data set of experiments/retokenize.py; null: no bits
    heldout_tokens: int | None = 500_000  # of it, supervised; null: all
    train_data: TrainDataConfig = field(default_factory=TrainDataConfig)  # how it is packed
    words_path: str | None = None  # words.txt of experiments/retokenize.py; null: not looked up
    num_samples: int = 240  # answers to the prompts in turn
    temperature: float = 0.8
    max_tokens: int = 200


@dataclass
class QualityConfig:
    """Keys of `experiments/quality.py`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    postprocess: PostprocessConfig = field(default_factory=PostprocessConfig)
    propose: ProposeConfig = field(default_factory=ProposeConfig)
    rival: ProposeConfig = field(default_factory=ProposeConfig)  # what the head is compared with
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    data: DataConfig = field(default_factory=DataConfig)  # prompts of the pair's own kind
    builtin: DataConfig = field(default_factory=DataConfig)  # and others
    builtin_max_tokens: int = 64
    text: TextConfig = field(default_factory=TextConfig)
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    seed: int = 0


@dataclass
class PairSecondsConfig:
    generate: float = 400
    pretrain: float = 240
    head: float = 150


@dataclass
class PairOverridesConfig:
    all: list[str] = field(default_factory=list)
    generate: list[str] = field(default_factory=list)
    retokenize: list[str] = field(default_factory=list)
    pretrain: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    quality: list[str] = field(default_factory=list)


@dataclass
class PairsConfig:
    """Keys of `experiments/pairs.py`."""

    path: str = "outputs/pairs"
    stages: list[str] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    workers: int = 5
    writer: str = MISSING
    seconds: PairSecondsConfig = field(default_factory=PairSecondsConfig)
    overrides: PairOverridesConfig = field(default_factory=PairOverridesConfig)
    export_path: str | None = None
    archive_path: str | None = None


SCHEMAS: dict[str, type] = {
    "retokenize": RetokenizeConfig,
    "pretrain": PretrainConfig,
    "quality": QualityConfig,
    "pairs": PairsConfig,
}


def register() -> None:
    """Make these schemas, and the other training scripts', listable in a defaults list."""
    config.register()
    register_schemas(SCHEMAS)
