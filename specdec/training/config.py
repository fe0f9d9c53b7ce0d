"""Typed keys of conf/generate.yaml and conf/train_mtp.yaml; see specdec/config.py."""

from dataclasses import dataclass, field

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
    StageConfig,
    TargetConfig,
    VerifyConfig,
    register_schemas,
)


@dataclass
class BankConfig(StageConfig):
    """Written prompts: (num, seed, *, eval_paths) -> rows with `turns`."""

    _target_: str = "specdec.prompts.training_prompts"


@dataclass
class PromptsConfig:
    bank: BankConfig = field(default_factory=BankConfig)
    num_prompts: int = 20_000  # of the bank
    gsm8k_path: str | None = None  # train.jsonl of GSM8K, for a bank that takes it
    eval_paths: list[str] = field(default_factory=list)  # no prompt shares a 13-gram with them
    max_prompt_tokens: int = 320  # with the template; longer prompts are left out
    passes: int = 2  # over all prompts; a prompt is answered greedily at most once


@dataclass
class InstructionsConfig:
    num: int = 0  # prompts that the model writes itself
    max_tokens: int = 128
    temperature: float = 1.0
    min_words: int = 4
    max_seconds: float | None = None


@dataclass
class ResponsesConfig:
    shares: dict[str, float] = field(default_factory=dict)  # temperature: share of the responses
    max_tokens: int = 256
    max_loop_share: float = 0.3  # of repeated 8-grams; a response above it is dropped
    num_tokens: int | None = None  # stop after so many output tokens; null: all prompts
    max_seconds: float | None = None


@dataclass
class GenerateConfig:
    """Keys of `experiments/generate.py`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    postprocess: PostprocessConfig = field(default_factory=PostprocessConfig)
    propose: ProposeConfig = field(default_factory=ProposeConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    instructions: InstructionsConfig = field(default_factory=InstructionsConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    path: str | None = None  # folder to write; null: `data` in the run folder
    num_processes: int = 1  # engines side by side on one device
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    seed: int = 0


@dataclass
class TrainDataConfig:
    paths: list[str] = field(default_factory=list)  # folders that generate.py wrote
    num_tokens: int | None = None  # use the first so many supervised tokens; null: all
    row_tokens: int = 32768  # columns of one micro-batch; samples are laid end to end


@dataclass
class ObjectiveConfig(StageConfig):
    """A divergence: (student, teacher, labels, weights) -> RowLoss."""

    _target_: str = "specdec.training.objective.divergence"
    kl: float = 0.0
    cross_entropy: float = 0.0
    total_variation: float = 0.0
    log_acceptance: float = 0.0


@dataclass
class OptimizerConfig(StageConfig):
    """(parameters by name) -> list of torch optimisers."""

    lr: float = MISSING


@dataclass
class AdamwConfig(OptimizerConfig):
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass
class MuonConfig(OptimizerConfig):
    matrix_lr: float = 0.02
    momentum: float = 0.95
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0


@dataclass
class LrScheduleConfig(StageConfig):
    """(share of the run that is done) -> factor of the learning rate."""

    warmup: float = 0.02


@dataclass
class DecayConfig(LrScheduleConfig):
    final: float = 0.0


@dataclass
class HeadConfig:
    """Of a new head; its family and axes are `draft.family` and `draft.axes`."""

    num_layers: int = 1
    aux_layers: list[int] | None = None  # of Eagle-3; null: (2, L // 2, L - 3)
    num_rows: int | None = None  # an own lm_head over the most frequent ids; null: the target's


@dataclass
class UnrollConfig:
    num_steps: int = 5  # draft steps that are trained
    decay: float = 0.8  # weight of step i is decay^i
    num_chunks: int = 16  # of the logits; more chunks take less memory


@dataclass
class BudgetConfig:
    """The run ends, and the learning-rate schedule with it, at the first limit that is reached."""

    epochs: int | None = None
    max_steps: int | None = None
    max_tokens: int | None = None  # token-passes
    max_seconds: float | None = None
    stop_after_steps: int | None = None  # leave here, to be resumed; the schedule is unaffected


@dataclass
class TrainConfig:
    """Keys of `train_mtp.py`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)  # path: the head to go on from
    head: HeadConfig = field(default_factory=HeadConfig)
    train_data: TrainDataConfig = field(default_factory=TrainDataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    unroll: UnrollConfig = field(default_factory=UnrollConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    postprocess: PostprocessConfig = field(default_factory=PostprocessConfig)
    propose: ProposeConfig = field(default_factory=ProposeConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    eval_every: int | None = None  # steps; null: at the end only; 0: never
    accumulation: int = 1  # rows an optimiser step
    clip_norm: float = 1.0
    average_decay: float = 0.995  # of the weights that are evaluated and exported; 0: no average
    compile: bool | None = None  # fuse the loss with torch.compile; null: on a GPU
    log_every: int = 10  # steps
    save_every: int | None = None  # steps between states for resuming; null: at the end
    resume: str | None = None  # run folder to go on from, with its overrides
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    seed: int = 0


SCHEMAS: dict[str, type] = {
    "generate": GenerateConfig,
    "train": TrainConfig,
    "train_data": TrainDataConfig,
    "objective": ObjectiveConfig,
    "adamw": AdamwConfig,
    "muon": MuonConfig,
    "lr_schedule": LrScheduleConfig,
    "decay": DecayConfig,
}


def register() -> None:
    """Make the schemas listable in the defaults of the scripts' configurations."""
    register_schemas(SCHEMAS)
