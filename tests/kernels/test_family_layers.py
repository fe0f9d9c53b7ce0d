"""Blocks of every family on the layers' kernels, beside the same blocks in torch."""

import pytest
import torch
from small_shapes import MORE, small_shape
from token_data import make_row_of

from specdec.experiments.targets import new_target, packed_forward
from specdec.kernels.runtime import using
from specdec.models.axes import FAMILIES
from specdec.models.eagle import EagleConfig, fuse, init_head
from specdec.models.layers import map_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("family", MORE)
def test_family(family):
    model = new_target(small_shape(family), seed=1, device=DEVICE)
    tree = model.tree(model.params, torch.float32)
    row = make_row_of([7, 4])
    row = row._replace(
        **{
            name: value.to(DEVICE)
            for name, value in row._asdict().items()
            if torch.is_tensor(value)
        }
    )
    row = row._replace(input_ids=torch.arange(11, device=DEVICE))
    with torch.no_grad():
        expected = packed_forward(tree, model.config, row, (0, 2, 3))
        with using("triton"):
            ours = packed_forward(tree, model.config, row, (0, 2, 3))
    for mine, theirs in zip(
        (ours.hidden, *ours.aux), (expected.hidden, *expected.aux), strict=True
    ):
        assert (mine - theirs).norm() / theirs.norm() < 1e-5


@pytest.mark.parametrize("family", ["llama_eagle3", "deepseek_mtp", "qwen3_next_mtp"])
def test_fusion_of_a_head(family):
    """Wide and projected fusion, with and without zero-centred norms."""
    target = new_target(small_shape(family.rpartition("_")[0]), seed=1).config
    config = EagleConfig(target, FAMILIES[family].axes)
    aux = {"aux_layers": (0, 1, 3), "aux_size": target.hidden_size} if "eagle3" in family else {}
    head = init_head(target, config.axes, std=0.5, device=DEVICE, **aux)
    head = head._replace(
        **{name: _random_like(getattr(head, name)) for name in ("embed_norm", "hidden_norm")}
    )
    embeds, hidden = torch.randn(2, 5, target.hidden_size, device=DEVICE)
    positions = torch.arange(5, device=DEVICE)
    expected = fuse(head, config, embeds, hidden, positions)
    with using("triton"):
        ours = fuse(head, config, embeds, hidden, positions)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def _random_like(norms):
    return map_tree(torch.randn_like, norms)
