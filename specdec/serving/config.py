"""Typed keys of serve.py's configuration."""

from dataclasses import dataclass, field

from specdec.config import (
    CacheConfig,
    DraftConfig,
    KernelsConfig,
    PostprocessConfig,
    ProposeConfig,
    ScheduleConfig,
    TargetConfig,
    VerifyConfig,
    register_schemas,
)


@dataclass
class ServeConfig:
    """Keys of `serve.py`. How to sample is each request's own affair."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    postprocess: PostprocessConfig = field(default_factory=PostprocessConfig)
    propose: ProposeConfig = field(default_factory=ProposeConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_key: str | None = None  # null: any key, or none, is accepted
    penalties: bool = False  # serve them: counts of (max_num_seqs + 1) x vocabulary x 4 bytes
    served_model_name: str | None = None  # null: the name of the target's file or folder
    drain_seconds: int = 60  # given to running requests after SIGTERM
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None


def register() -> None:
    """Make the schema listable in the defaults of serve.yaml."""
    register_schemas({"serve": ServeConfig})
