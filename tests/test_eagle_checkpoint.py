"""Eagle checkpoints: own and shared tables, reduced vocabularies, export and reading back."""

import json
from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import CheckpointError, ConfigError
from specdec.models.axes import HeadAxes
from specdec.models.eagle import EagleConfig, eagle_block, init_head
from specdec.models.eagle_checkpoint import save_head, save_target_rows
from specdec.models.layers import map_tree, tree_leaves, unpack
from specdec.models.load import load_draft, open_checkpoint

RANKING = torch.tensor([40, 7, 100, 3, 99, 0, 55, 12])


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target(tie_word_embeddings=False)


def edit(folder, settings=None, drop=(), **tensors):
    """Changes a checkpoint's config and tensors in place."""
    config = json.loads((folder / "config.json").read_text()) | (settings or {})
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in stored.items() if name not in drop}
    save_file(kept, folder / "model.safetensors")
    return folder


def refused(folder, target, match, **options):
    tiny.one_line_error(lambda: load_draft(folder, target, **options), CheckpointError, match)


def one_pass(draft):
    batch = tiny.make_batch([tiny.Step([1, 2, 3], 0, [1])], 4)
    hidden = torch.linspace(-1, 1, 96).view(3, 32)
    ids = torch.tensor([9, 60, 11])
    out = draft.forward(ids, hidden, batch, tiny.new_cache(draft, 2, 4), 0)
    return draft.logits(out.for_logits, 0)


def test_published_names_and_nothing_shared(target, tmp_path):
    """C1: an export holds the head's own tensors only."""
    folder = tiny.write_draft(tmp_path, target)
    layer = "layers.0."
    assert set(load_file(folder / "model.safetensors")) == {
        "fc.weight",
        f"{layer}post_attention_layernorm.weight",
        *(f"{layer}self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"{layer}mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["bias"]) == (1, False)


def test_absent_tables_are_the_targets(target, tmp_path):
    """C1 a: no lm_head in the file, sizes equal: the target's logits, the target's embedding."""
    draft = load_draft(tiny.write_draft(tmp_path, target), target)
    hidden = torch.randn(3, 32)
    assert torch.equal(draft.logits(hidden, 0), target.logits(hidden))
    assert draft.vocab_map is None
    assert draft.vocab_size == target.vocab_size
    again = tiny.tiny_draft(target)
    assert torch.equal(one_pass(draft), one_pass(again))


def test_own_tables_win(target, tmp_path):
    """C1 b: a sentinel row in the draft's head and embedding survives loading."""
    own_head, own_embed = target.lm_head.clone(), target.embed.clone()
    own_head[13], own_embed[60] = 7.0, 7.0
    folder = tiny.write_draft(tmp_path, target, lm_head=own_head)
    hidden = torch.randn(3, 32)
    logits = load_draft(folder, target).logits(hidden, 0)
    torch.testing.assert_close(logits[:, 13], 7 * hidden.sum(-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits[:, :13], target.logits(hidden)[:, :13])
    shared = one_pass(load_draft(tiny.write_draft(tmp_path / "a", target), target))
    owned = one_pass(load_draft(tiny.write_draft(tmp_path / "b", target, embed=own_embed), target))
    assert torch.equal(shared[0], owned[0])
    assert not torch.allclose(shared[1], owned[1])


def test_a_trained_head_reloads_beside_the_same_embedding(target, tmp_path):
    """C1 c: train one step, export in bf16, reload: the target's tables are bitwise unchanged."""
    before = target.embed.clone(), target.lm_head.clone()
    block = replace(target.config, num_layers=1)
    head = map_tree(lambda t: t.requires_grad_(), init_head(block))
    optimizer = torch.optim.AdamW(tree_leaves(head), lr=1e-2)
    embeds, hidden = target.embed[[4, 5, 6]], torch.randn(3, 32)
    out = eagle_block(head, EagleConfig(block), embeds, hidden, torch.arange(3), lambda q, *_: q)
    (out.for_logits @ target.lm_head.T).logsumexp(-1).sum().backward()
    optimizer.step()
    save_head(tmp_path, head, EagleConfig(block))
    assert "embed_tokens.weight" not in open_checkpoint(tmp_path)
    assert {tensor.dtype for tensor in open_checkpoint(tmp_path).values()} == {torch.bfloat16}
    draft = load_draft(tmp_path, target)
    for ours, theirs in zip(tree_leaves(draft.params), tree_leaves(head), strict=True):
        assert torch.equal(unpack(ours), theirs.detach().bfloat16().float())
    assert torch.equal(target.embed, before[0])
    assert torch.equal(target.lm_head, before[1])
    assert torch.equal(draft.logits(hidden, 0), target.logits(hidden))


def test_a_reduced_vocabulary_needs_a_head(target, tmp_path):
    """C1 d."""
    folder = edit(tiny.write_draft(tmp_path, target), {"draft_vocab_size": 50})
    refused(folder, target, "lacks lm_head.weight")


def test_tables_of_another_size_are_not_shared(target, tmp_path):
    refused(
        edit(tiny.write_draft(tmp_path / "a", target), {"vocab_size": 90}),
        target,
        "lacks embed_tokens.weight, and the target's of 101 rows cannot stand in for 90",
    )
    small = edit(
        tiny.write_draft(tmp_path / "b", target, lm_head=target.lm_head),
        {"vocab_size": 90},
        **{"embed_tokens.weight": target.embed[:90].clone()},
    )
    refused(small, target, "embed_tokens.weight has 90 rows for a target of 101 ids")


def test_padded_widths_are_one_vocabulary(target, tmp_path):
    """C5: equal ids, another padding."""
    padded = tiny.tiny_target(vocab_size=104)._replace(vocab_size=98)
    folder = edit(tiny.write_draft(tmp_path, target), {"vocab_size": 98})
    assert load_draft(folder, padded).vocab_size == 98
    own = edit(
        tiny.write_draft(tmp_path / "own", padded, lm_head=padded.lm_head[:100].clone()),
        {"draft_vocab_size": 100},
    )
    assert load_draft(own, padded).vocab_size == 98


def test_every_tensor_is_loaded_or_named(target, tmp_path):
    folder = tiny.write_draft(tmp_path / "whole", target)
    for number, name in enumerate(load_file(folder / "model.safetensors")):
        cut = edit(tiny.write_draft(tmp_path / str(number), target), drop=[name])
        refused(cut, target, rf"lacks {name}$")
    extra = {"layers.0.input_layernorm.weight": torch.ones(32)}
    refused(edit(folder, **extra), target, "unknown tensors: layers.0.input_layernorm.weight")
    bias = edit(tiny.write_draft(tmp_path / "b", target), **{"fc.bias": torch.full((32,), 5.0)})
    assert load_draft(bias, target).params.fc_bias[0] == 5.0


def test_other_spellings_are_the_same_model(target, tmp_path):
    """C2: `midlayer.` for `layers.0.`; and names under `model.`."""
    folder = tiny.write_draft(tmp_path, target)
    expected = one_pass(load_draft(folder, target))
    stored = load_file(folder / "model.safetensors")
    for old, new in (("layers.0.", "midlayer."), ("", "model.")):
        renamed = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in stored.items()
        }
        save_file(renamed, folder / "model.safetensors")
        assert torch.equal(one_pass(load_draft(folder, target)), expected)


@pytest.mark.parametrize(("num_rows", "expected"), [(None, 8), (8, 8), (3, 3), (1, 1)])
def test_target_rows_from_a_ranking(target, tmp_path, num_rows, expected):
    """The first rows of the ranking, in the order of their ids, through the target's own head."""
    folder = tiny.write_draft(tmp_path, target)
    save_target_rows(folder, RANKING)
    draft = load_draft(folder, target, logits_from="target_rows", num_draft_rows=num_rows)
    chosen = RANKING[:expected].sort().values
    assert torch.equal(draft.vocab_map.d2t, chosen)
    assert draft.vocab_size == expected
    assert draft.vocab_map.t2d.shape == (101,)
    assert torch.equal(draft.vocab_map.t2d[chosen], torch.arange(expected))
    assert (draft.vocab_map.t2d >= 0).sum() == expected
    hidden = torch.randn(2, 32)
    full = target.logits(hidden)[:, chosen]
    torch.testing.assert_close(draft.logits(hidden, 0), full, rtol=1e-5, atol=1e-5)
    assert draft.config.axes == HeadAxes(logits_from="target_rows")
    plain = load_draft(folder, target)
    assert plain.vocab_map is None


def test_target_rows_from_d2t_in_the_checkpoint(target, tmp_path):
    chosen = torch.tensor([3, 7, 8, 60])
    folder = tiny.write_draft(tmp_path, target)
    edit(folder, {"draft_vocab_size": 4}, d2t=chosen - torch.arange(4))
    draft = load_draft(folder, target, logits_from="target_rows")
    assert torch.equal(draft.vocab_map.d2t, chosen)
    options = {"logits_from": "target_rows", "num_draft_rows": 3}
    refused(folder, target, "num_draft_rows=3, but its d2t lists 4", **options)
    edit(folder, d2t=torch.tensor([3, 2, 0, 0]))
    refused(folder, target, "increasing ids", logits_from="target_rows")


def test_an_own_reduced_head_maps_its_ids(target, tmp_path):
    chosen = torch.tensor([3, 7, 8, 60, 100])
    own = torch.randn(5, 32)
    folder = tiny.write_draft(tmp_path, target, lm_head=own, d2t=chosen)
    assert torch.equal(open_checkpoint(folder)["d2t"], chosen - torch.arange(5))
    draft = load_draft(folder, target)
    assert torch.equal(draft.vocab_map.d2t, chosen)
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(draft.logits(hidden, 0), hidden @ own.T)
    edit(folder, t2d=torch.zeros(101, dtype=torch.bool).index_fill(0, chosen, True))
    assert load_draft(folder, target).vocab_size == 5
    refused(folder, target, "own lm_head.weight", logits_from="target_rows")
    edit(folder, t2d=torch.ones(101, dtype=torch.bool))
    refused(folder, target, "t2d does not mark the ids that d2t lists")
    edit(folder, d2t=torch.zeros(4, dtype=torch.int64))
    refused(folder, target, "d2t has 4 entries for 5 draft ids")


def test_ids_past_the_vocabulary_are_never_drafted(tmp_path):
    padded = tiny.tiny_target(vocab_size=104)._replace(vocab_size=98)
    folder = tiny.write_draft(tmp_path, padded)
    save_target_rows(folder, torch.tensor([99, 5, 103, 97, 98]))
    draft = load_draft(folder, padded, logits_from="target_rows")
    assert draft.vocab_map.d2t.tolist() == [5, 97]
    assert draft.vocab_size == 2
    own = tiny.write_draft(
        tmp_path / "own", padded, lm_head=torch.randn(3, 32), d2t=torch.tensor([5, 97, 103])
    )
    assert load_draft(own, padded).vocab_size == 2


def test_rows_that_cannot_be_chosen(target, tmp_path):
    folder = tiny.write_draft(tmp_path, target)
    rows = {"logits_from": "target_rows"}
    refused(folder, target, "needs d2t or target_rows.safetensors", **rows)
    save_target_rows(folder, RANKING)
    refused(folder, target, "num_draft_rows=9 is not within the 8 ids", num_draft_rows=9, **rows)
    save_target_rows(folder, torch.tensor([5, 5, 7]))
    refused(folder, target, "increasing ids of the target, one each", **rows)
    save_file({"other": RANKING}, folder / "target_rows.safetensors")
    refused(folder, target, "must hold one tensor, target_rows", **rows)
    save_target_rows(folder, RANKING[None])
    refused(folder, target, "target_rows is .1, 8., not a list of ids", **rows)
    refused(folder, target, "num_draft_rows=3 are of the target's lm_head", num_draft_rows=3)
    with pytest.raises(ConfigError, match="logits_from='elsewhere' is not one of: shared"):
        load_draft(folder, target, logits_from="elsewhere")


def test_device_and_dtype_are_the_targets(target, tmp_path):
    folder = tiny.write_draft(tmp_path, target)
    load_draft(folder, target, device="cpu", dtype="float32")
    refused(folder, target, "dtype torch.bfloat16 differs", dtype="bfloat16")
    refused(folder, target, "device cuda differs", device="cuda")


def test_only_the_published_head_is_exported(target, tmp_path):
    head, config = tiny.tiny_head(target)
    normed = replace(config, axes=HeadAxes(first_input_norm=True))
    with pytest.raises(
        ConfigError, match="llama_eagle layout holds heads with first_input_norm=False"
    ):
        save_head(tmp_path, head, normed)
    with pytest.raises(ConfigError, match="d2t belongs to an own lm_head"):
        save_head(tmp_path, head, config, d2t=RANKING)
    assert not list(tmp_path.iterdir())
