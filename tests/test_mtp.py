"""MTP heads: where they lie in a checkpoint, how they are wired, several layers in turn."""

from functools import partial

import head_files as files
import head_runs
import pytest
import tiny
import torch
from head_runs import HEADS
from running import requests, tiny_engine
from tiny import Step, make_batch, new_cache

from specdec.errors import CheckpointError
from specdec.generate import generate
from specdec.models.eagle import eagle_draft, fuse
from specdec.models.heads import read_draft
from specdec.models.layers import map_tree, tree_leaves, unpack
from specdec.models.load import build_target, load_draft, load_target
from specdec.propose.autoregressive import autoregressive

DEEPSEEK, QWEN3_NEXT = HEADS["deepseek_mtp"], HEADS["qwen3_next_mtp"]
MTP = [name for name in HEADS if "mtp" in name]


def whole(case, seed=1):
    """The tensors of a target's checkpoint with its head."""
    shapes = files.target(case.target)
    return files.random_state(shapes, zero_centred=case.zero_centred) | head_runs.head_state(
        case, seed
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("v3"), DEEPSEEK.target, whole(DEEPSEEK))


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


def test_the_targets_own_folder_holds_its_head(folder, target):
    """C2: two layers, the head at model.layers.2.*: every tensor equals the file."""
    draft = load_draft(folder, target)
    state, prefix = whole(DEEPSEEK), "model.layers.2."
    head = map_tree(unpack, draft.params)
    layer = head.layers[0]
    for ours, name in (
        (head.fc[0], "eh_proj"),
        (head.embed_norm[0], "enorm"),
        (head.hidden_norm[0], "hnorm"),
        (head.norm[0], "shared_head.norm"),
        (layer.input_norm, "input_layernorm"),
        (layer.attention.q_down, "self_attn.q_a_proj"),
        (layer.attention.kv_up.flatten(0, 1), "self_attn.kv_b_proj"),
        (layer.mlp.gate, "mlp.gate"),
        (layer.mlp.experts.down[5], "mlp.experts.5.down_proj"),
        (layer.mlp.experts.gate_up[7, 24:], "mlp.experts.7.up_proj"),
    ):
        assert torch.equal(ours, state[f"{prefix}{name}.weight"])
    numbers = sum(t.numel() for n, t in state.items() if n.startswith(prefix))
    tables = 2 * 101 * 32  # embed_tokens and shared_head.head repeat the target's
    assert sum(leaf.numel() for leaf in tree_leaves(head)) == numbers - tables


@pytest.mark.parametrize("case", [DEEPSEEK, QWEN3_NEXT], ids=["deepseek", "qwen3_next"])
def test_the_target_ignores_the_heads_layers(case):
    """C2: the same logits with the extra layer in the file and without."""
    state = whole(case)
    alone = {n: t for n, t in state.items() if n in files.target(case.target)}
    assert len(alone) < len(state)
    both, one = (build_target(files.checkpoint(s), case.target) for s in (state, alone))
    assert torch.equal(tiny.logits(both), tiny.logits(one))


@pytest.mark.parametrize("name", ["deepseek_mtp_2_layers", "qwen3_next_mtp_2_layers", "ernie_mtp"])
def test_every_tensor_is_loaded_or_named(name):
    case = HEADS[name]
    target = head_runs.load(case).target
    state = head_runs.head_state(case)
    spare = [
        n for n in state if n.startswith("model.layers.") and n.endswith("embed_tokens.weight")
    ]
    spare += [n for n in state if n.endswith("shared_head.head.weight")]
    for gone in state:
        left = files.checkpoint({n: t for n, t in state.items() if n != gone})
        if gone in spare:
            assert read_draft(left, case.head, target)
            continue
        tiny.one_line_error(
            lambda left=left: read_draft(left, case.head, target), CheckpointError, f"lacks {gone}$"
        )
    extra = next(iter(state)).rpartition(".")[0] + ".ghost"
    tiny.one_line_error(
        lambda: read_draft(files.checkpoint(state | {extra: torch.ones(1)}), case.head, target),
        CheckpointError,
        f"unknown tensors: {extra}",
    )


def test_a_head_that_was_left_out_is_named(target):
    """C2: a re-upload without the extra layer fails at load, with the names."""
    bare = files.checkpoint(files.random_state(files.target(DEEPSEEK.target)))
    tiny.one_line_error(
        lambda: read_draft(bare, DEEPSEEK.head, target),
        CheckpointError,
        "lacks model.layers.2.eh_proj",
    )
    none = DEEPSEEK.head | {"num_nextn_predict_layers": 0}
    tiny.one_line_error(
        lambda: read_draft(bare, none, target), CheckpointError, "num_nextn_predict_layers=0"
    )
    more = DEEPSEEK.head | {"num_nextn_predict_layers": 2}
    tiny.one_line_error(
        lambda: read_draft(files.checkpoint(whole(DEEPSEEK)), more, target),
        CheckpointError,
        "lacks model.layers.3.eh_proj",
    )


def test_embedding_and_head_are_always_the_targets(target):
    """What the file repeats of them is not read, but must have their shape."""
    state = whole(DEEPSEEK)
    for name in ("embed_tokens", "shared_head.head"):
        state[f"model.layers.2.{name}.weight"] = torch.full((101, 32), float("nan"))
    draft = read_draft(files.checkpoint(state), DEEPSEEK.head, target)
    hidden = torch.randn(2, 32)
    assert torch.equal(draft.logits(hidden, 0), target.logits(hidden))
    rounds = head_runs.record(target, draft, 2, max_tokens=4)
    assert all(logits.isfinite().all() for drafted in rounds for logits in drafted.logits)
    state["model.layers.2.shared_head.head.weight"] = torch.zeros(90, 32)
    tiny.one_line_error(
        lambda: read_draft(files.checkpoint(state), DEEPSEEK.head, target),
        CheckpointError,
        r"shared_head.head.weight is \[90, 32\], but it repeats the target's table of \[101, 32\]",
    )


def test_settings_below_text_config():
    """Qwen3.5's config.json keeps the language model's settings one level down."""
    case = HEADS["qwen_mtp"]
    pair = head_runs.load(case)
    nested = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    nested["text_config"] = case.head
    draft = read_draft(files.checkpoint(whole(case)), nested, pair.target)
    for ours, theirs in zip(tree_leaves(draft.params), tree_leaves(pair.draft.params), strict=True):
        assert torch.equal(unpack(ours), unpack(theirs))


def test_experts_in_one_tensor():
    """transformers' layout of experts, as Qwen3.5's MoE heads have it."""
    pair = head_runs.load(QWEN3_NEXT)
    state, experts = whole(QWEN3_NEXT), "mtp.layers.0.mlp.experts."
    names = ("gate", "up", "down")
    stacks = {
        n: torch.stack([state.pop(f"{experts}{e}.{n}_proj.weight") for e in range(6)])
        for n in names
    }
    state[f"{experts}gate_up_proj"] = torch.cat((stacks["gate"], stacks["up"]), dim=1)
    state[f"{experts}down_proj"] = stacks["down"]
    draft = read_draft(files.checkpoint(state), QWEN3_NEXT.head, pair.target)
    for ours, theirs in zip(tree_leaves(draft.params), tree_leaves(pair.draft.params), strict=True):
        assert torch.equal(unpack(ours), unpack(theirs))


@pytest.mark.parametrize("case", [DEEPSEEK, QWEN3_NEXT], ids=["deepseek", "qwen3_next"])
@pytest.mark.parametrize("half", [0, 1])
def test_the_projection_takes_the_embedding_first(case, half):
    """K1: [I | 0] passes enorm(embedding) on, [0 | I] hnorm(hidden)."""
    pair = head_runs.load(case)
    eye = torch.zeros(32, 64)
    eye[:, 32 * half : 32 * half + 32] = torch.eye(32)
    head = map_tree(unpack, pair.draft.params)
    head = head._replace(fc=map_tree(lambda _: eye, head.fc))
    embeds, hidden, positions = torch.randn(3, 32), torch.randn(3, 32), torch.tensor([1, 2, 3])
    names = {
        "deepseek_v3": ("model.layers.2.enorm", "model.layers.2.hnorm"),
        "qwen3_next": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
    }[case.target["model_type"]]
    weight = pair.head_state[f"{names[half]}.weight"] + case.zero_centred
    expected = torch.nn.functional.rms_norm((embeds, hidden)[half], (32,), weight, 1e-6)
    fused = fuse(head, pair.draft.config, embeds, hidden, positions)
    torch.testing.assert_close(fused, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "axes", "matters"),
    [
        ("deepseek_mtp", {}, False),
        ("deepseek_mtp", {"position0_embedding": "kept"}, True),
        ("qwen3_next_mtp", {}, True),
        ("ernie_mtp", {}, False),
    ],
)
def test_the_token_behind_position_0(name, axes, matters):
    """K1: where the family zeroes its embedding, that token has no effect on row 0."""
    pair = head_runs.load(HEADS[name], axes=axes)
    hidden = torch.randn(2, 32)
    batch = make_batch([Step([0, 0], 0, [1])], 4)
    a, b = (
        pair.draft.forward(torch.tensor(ids), hidden, batch, new_cache(pair.draft, 2, 4), 0)
        for ids in ([5, 9], [60, 9])
    )
    assert torch.equal(a.recycle[0], b.recycle[0]) == (not matters)


@pytest.mark.parametrize("recycle", ["post_norm", "pre_norm", "pinned"])
def test_what_the_second_step_is_given(recycle):
    """K1: with a block that adds nothing, step 2 is given the norm of what the fusion made."""
    pair = head_runs.load(DEEPSEEK, axes={"recycle": recycle})
    head, given = map_tree(unpack, pair.draft.params), []
    layer = head.layers[0]
    layer = layer._replace(
        attention=layer.attention._replace(out=torch.zeros_like(layer.attention.out)),
        mlp=layer.mlp._replace(
            experts=layer.mlp.experts._replace(down=torch.zeros_like(layer.mlp.experts.down)),
            shared=layer.mlp.shared._replace(down=torch.zeros_like(layer.mlp.shared.down)),
        ),
    )
    draft = eagle_draft(head._replace(layers=(layer,)), pair.draft.config, pair.target)

    def forward(ids, hidden, batch, cache, step):
        out = draft.forward(ids, hidden, batch, cache, step)
        given.append((ids, hidden, batch.positions, out))
        return out

    engine = tiny_engine(pair.target, draft._replace(forward=forward), autoregressive, k=2)
    engine.add(requests([[7, 3, 60, 2]], max_tokens=8)[0])
    engine.step()
    (ids, hidden, positions, _), (_, second, _, _) = given
    fused = fuse(head, pair.draft.config, pair.target.embed[ids], hidden, positions)
    norm = torch.nn.functional.rms_norm(fused, (32,), head.norm[0], 1e-6)
    expected = {"post_norm": norm, "pre_norm": fused, "pinned": hidden}[recycle]
    torch.testing.assert_close(second, expected[-1:], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("layers", "k", "expected"),
    [(3, 3, [0, 1, 2]), (3, 5, [0, 1, 2, 0, 1]), (1, 3, [0, 0, 0]), (2, 1, [0]), (3, 0, [])],
)
def test_layers_take_turns(layers, k, expected):
    """K5: draft step i runs layer i mod n. Before it, every layer runs over the committed rows;
    each writes keys of its own."""
    case = head_runs.mtp_case(files.DEEPSEEK, layers=layers)
    pair = head_runs.load(case)
    ran, wrote = [], []

    def forward(ids, hidden, batch, cache, step):
        before = [keys.clone() for keys in cache.keys]
        out = pair.draft.forward(ids, hidden, batch, cache, step)
        changed = [i for i, keys in enumerate(cache.keys) if not torch.equal(keys, before[i])]
        ran.append(step % layers)
        wrote.append(changed)
        return out

    engine = tiny_engine(pair.target, pair.draft._replace(forward=forward), autoregressive, k=k)
    assert len(engine.draft.cache.keys) == layers
    engine.add(requests([[7, 3, 60, 2, 9]], max_tokens=8)[0])
    engine.step()
    assert ran[:layers] == list(range(layers))
    assert [0, *ran[layers:]][:k] == expected
    assert wrote == [[layer] for layer in ran]


@pytest.mark.parametrize("name", ["deepseek_mtp_3_layers", "qwen3_next_mtp_2_layers", "ernie_mtp"])
def test_no_layers_cache_has_holes(name):
    """K2: after rounds with rejections, the keys of all layers equal a fresh pass over the text."""
    pair = head_runs.load(HEADS[name])
    engine = tiny_engine(pair.target, pair.draft, autoregressive, eos=(), k=4)
    engine.add(requests([[7, 3, 60, 2, 9, 9, 41]], max_tokens=60)[0])
    rounds = []
    while len(rounds) < 10:
        rounds += [output.round for output in engine.step() if output.round]
    assert sum(r.accepted < r.drafted for r in rounds) > 0
    text = engine.running[0].token_ids
    fresh = tiny_engine(pair.target, pair.draft, autoregressive, eos=())
    fresh.add(requests([text], max_tokens=5)[0])
    while not fresh.step():
        pass
    for depth in range(pair.draft.num_depths):
        final = len(text) - 1 - depth  # rows of this layer behind which all tokens were committed
        keys = [
            torch.cat(
                [e.draft.cache.keys[depth][b] for b in e.state.block_tables[e.running[0].slot]]
            )
            for e in (engine, fresh)
        ]
        assert (keys[0][:final] - keys[1][:final]).abs().max() <= 1e-5
        assert keys[0][:final].abs().amax(dim=(1, 2)).min() > 0


@pytest.mark.parametrize("name", ["deepseek_mtp_3_layers", "qwen3_next_mtp_2_layers"])
def test_more_and_fewer_drafts_from_step_to_step(name):
    """Steps that draft nothing still feed every layer (K3's kind)."""
    pair = head_runs.load(HEADS[name])
    for drafted in head_runs.record(pair.target, pair.draft, 4, counts=[3, 0, 0, 4, 1, 2]):
        head_runs.check(pair, drafted)


def test_preempted_requests_start_over():
    """A cache too small for all: what layers hand on belongs to a slot's present request."""
    pair = head_runs.load(HEADS["deepseek_mtp_3_layers"])
    small, preempted = {"max_model_len": 40, "num_blocks": 14, "max_tokens": 12}, []
    watch = lambda engine: preempted.append(engine.num_preemptions)  # noqa: E731
    seen = head_runs.record(pair.target, pair.draft, 3, watch=watch, **small)
    assert preempted[0] > 0
    for drafted in seen:
        head_runs.check(pair, drafted)


@pytest.mark.parametrize("name", MTP)
@pytest.mark.parametrize("batch", [1, 5])
def test_speculation_equals_plain_decoding(name, batch):
    pair = head_runs.load(HEADS[name])
    asked = requests([*head_runs.PROMPTS, [50, 60, 70], [4] * 9], max_tokens=12)
    run = partial(tiny_engine, pair.target, max_num_seqs=batch)
    plain = generate(run(), asked)
    for k in (1, 4):
        results = generate(run(pair.draft, autoregressive, k=k), asked)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]
