"""Loading keeps one copy of the weights: each tensor is read, converted and packed in turn."""

import os
import subprocess
import sys

import families
import pytest
import tiny

from specdec.models.deepseek_checkpoint import deepseek_config, deepseek_layout
from specdec.models.llama_checkpoint import llama_config
from specdec.models.qwen3_moe_checkpoint import qwen3_moe_config, qwen3_moe_layout

MEGABYTE = 2**20
MEASURE = """
import threading, time
import torch
from specdec.models.layers import tree_leaves
from specdec.models.load import load_target

def private():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], private())
        time.sleep(0.0005)

torch.set_num_threads(1)
load_target({warm!r}, dtype={dtype!r})
before, peak, done = private(), [0.0], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
target = load_target({folder!r}, dtype={dtype!r})
done.set()
thread.join()
print(before, peak[0], private())
"""


def write_shards(folder, config, state):
    from huggingface_hub import save_torch_state_dict

    tiny.write_checkpoint(folder, config, {})
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(dict(state), folder, max_shard_size="15MB")
    return folder


def llama():
    config = tiny.tiny_config(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=16, tie_word_embeddings=False
    )
    assert llama_config(config).num_layers == 16
    return config, tiny.tiny_state(config)


def qwen3_moe():
    from test_qwen3_moe import TINY

    config = {
        **TINY,
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "num_hidden_layers": 12,
        "num_experts": 16,
        "moe_intermediate_size": 256,
    }
    return config, families.random_state(qwen3_moe_layout(qwen3_moe_config(config)))


def deepseek():
    from test_deepseek import TINY

    config = {
        **TINY,
        "model_type": "deepseek_v3",
        "hidden_size": 256,
        "num_hidden_layers": 16,
        "intermediate_size": 1024,
        "first_k_dense_replace": 8,
        "moe_intermediate_size": 128,
    }
    return config, families.random_state(deepseek_layout(deepseek_config(config)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("model", [llama, qwen3_moe, deepseek])
def test_peak_is_near_the_weights(model, tmp_path):
    config, state = model()
    size = sum(t.numel() * t.element_size() for t in state.values()) / MEGABYTE
    assert size > 45
    folder = write_shards(tmp_path / "model", config, state)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    warm = tiny.write_target(tmp_path / "warm")
    script = MEASURE.format(warm=str(warm), folder=str(folder), dtype="float32")
    # freed tensors go back at once, so that what is counted is what is in use
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    before, peak, after = map(float, run.stdout.split()[-3:])
    assert after - before > 0.9 * size
    assert peak - before < 1.2 * size
