"""Public checkpoints in full size, on the `meta` device: every tensor is used, none is unknown."""

import public_models as public
import pytest
import torch

from specdec.errors import CheckpointError
from specdec.models.batch import CacheShape
from specdec.models.layers import tree_leaves
from specdec.models.load import build_target

MODELS = {  # config, tensors, published number of parameters, bytes of cache a token in bf16
    "llama_3_1_8b": (public.LLAMA_3_1_8B, public.llama_tensors, 8_030_261_248, 131072),
    "qwen3_8b": (public.QWEN3_8B, public.llama_tensors, 8_190_735_360, 147456),
    "qwen3_30b_a3b": (public.QWEN3_30B_A3B, public.qwen3_moe_tensors, 30_532_122_624, 98304),
    "deepseek_v3": (public.DEEPSEEK_V3, public.deepseek_tensors, 671_026_419_200, 70272),
}


def load(config, stored):
    reads = public.Reads(stored, config)
    target = build_target(reads.checkpoint, config, device="meta", dtype=torch.bfloat16)
    return target, reads


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_used(name):
    config, tensors, num_parameters, cache_bytes = MODELS[name]
    stored = tensors(config)
    spare = {n for n in stored if n.startswith("model.layers.61.")}  # DeepSeek's MTP layer
    target, reads = load(config, stored)
    assert reads.names == stored.keys() - spare
    leaves = tree_leaves((target.params, target.embed, target.lm_head))
    assert all(leaf.is_meta for leaf in leaves)
    unique = {id(leaf): leaf for leaf in leaves}.values()
    assert sum(leaf.numel() for leaf in unique) == num_parameters
    assert public.num_elements({n: s for n, s in stored.items() if n not in spare}) == (
        num_parameters
    )
    cache = target.new_cache(CacheShape(2, 16, 1, 4))
    size = sum(t.numel() * t.element_size() for t in tree_leaves(cache))
    assert size == 2 * 16 * cache_bytes


@pytest.mark.parametrize("name", ["llama_3_1_8b", "qwen3_8b", "qwen3_30b_a3b"])
def test_one_tensor_more_or_less_is_named(name):
    config, tensors, *_ = MODELS[name]
    stored = tensors(config)
    extra = {**stored, "model.layers.3.self_attn.z_proj.weight": ((4, 4), torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"unknown.*layers.3.self_attn.z_proj"):
        load(config, extra)
    last = next(reversed(stored))
    del stored[last]
    with pytest.raises(CheckpointError, match=rf"lacks {last}$"):
        load(config, stored)
