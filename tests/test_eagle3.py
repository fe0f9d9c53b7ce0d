"""Eagle-3: which streams it reads, its switches, its reduced vocabulary."""

from functools import partial

import families
import head_files as files
import head_runs
import pytest
import tiny
import torch
from running import requests, tiny_engine
from tiny import Step, make_batch, new_cache

from specdec.errors import CheckpointError, ConfigError
from specdec.generate import generate
from specdec.models.eagle3 import aux_layer_ids, eagle3_axes
from specdec.models.heads import detect_head, read_draft
from specdec.models.load import load_target
from specdec.propose.autoregressive import autoregressive
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

TEXT = [7, 3, 60, 2, 9, 9, 41, 5, 1, 13, 22]
CASE = head_runs.HEADS["llama_eagle3"]


@pytest.fixture(scope="module")
def pair():
    return head_runs.load(CASE)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """(our target of 8 layers, transformers' model)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("deep")
    settings = files.LLAMA | {"num_hidden_layers": 8}
    kept = {k: v for k, v in settings.items() if k not in ("model_type", "architectures")}
    theirs = families.write_model(
        folder, LlamaForCausalLM(LlamaConfig(**kept, attn_implementation="eager"))
    )
    return load_target(folder), theirs


def streams(target, ids, text=TEXT):
    batch = make_batch([Step(text, 0, [1, 2, 3])], 4)
    return target.capture(ids).forward(batch, new_cache(target, 4, 4))


def test_default_streams_are_the_boundaries_2_half_and_last_but_3(deep):
    """C4: L = 8: transformers' hidden_states[2], [4], [5]."""
    ours, theirs = deep
    ids = aux_layer_ids({}, 8)
    assert ids == (2, 4, 5)
    out = streams(ours, ids)
    with torch.no_grad():
        states = theirs(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    for stream, index in zip(out.aux, ids, strict=True):
        error = (stream - states[index][0]).norm() / states[index].norm()
        assert error < 1e-6
    alone = [streams(ours, (index,)).aux[0] for index in ids]
    assert torch.equal(torch.cat(out.aux, dim=-1), torch.cat(alone, dim=-1))
    assert torch.cat(out.aux, dim=-1).shape == (len(TEXT), 3 * 32)


def test_the_last_boundary_is_the_final_norms_input(deep):
    """C4: ids = [4, 6, 8] of 8 layers."""
    ours, _ = deep
    out = streams(ours, (4, 6, 8))
    norm = torch.nn.functional.rms_norm(
        out.aux[2], (32,), ours.params.norm, ours.config.rms_norm_eps
    )
    assert torch.equal(norm, out.hidden)
    assert torch.equal(out.hidden, streams(ours, ()).hidden)
    first = streams(ours, (0,)).aux[0]
    assert torch.equal(first, ours.embed[TEXT])


@pytest.mark.parametrize(
    ("settings", "num_layers", "expected"),
    [
        ({}, 32, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, 32, (1, 15, 28)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}, 32, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [8, 2]}, 8, (8, 2)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 5, 6]},
            },
            8,
            (1, 2, 3),
        ),
    ],
)
def test_listed_streams_are_taken_as_they_stand(settings, num_layers, expected):
    assert aux_layer_ids(settings, num_layers) == expected


@pytest.mark.parametrize(
    ("ids", "num_layers", "match"),
    [
        (None, 4, r"the default \(2, L // 2, L - 3\) does not fit: .*\[2, 2, 1\] repeat"),
        (None, 2, "auxiliary layer -1"),
        ([2, 2, 5], 8, r"\[2, 2, 5\] repeat one"),
        ([-1, 2, 5], 8, r"auxiliary layer -1 of \[-1, 2, 5\] is not within 0..8"),
        ([2, 4, 9], 8, "auxiliary layer 9"),
    ],
)
def test_streams_that_do_not_exist_are_named(ids, num_layers, match):
    """C4: duplicates and negatives, one line each."""
    settings = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    tiny.one_line_error(lambda: aux_layer_ids(settings, num_layers), CheckpointError, match)


def test_a_target_that_gives_no_streams_is_named(pair):
    bare = pair.target._replace(capture=None)
    tiny.one_line_error(
        lambda: tiny_engine(bare, pair.draft, autoregressive), ConfigError, "auxiliary layers"
    )


def changed(settings=None, drop=(), **tensors):
    """(settings, checkpoint) of the case, edited."""
    state = {k: v for k, v in head_runs.head_state(CASE).items() if k not in drop} | tensors
    return CASE.head | (settings or {}), files.checkpoint(state)


def read(pair, settings=None, drop=(), **tensors):
    settings, checkpoint = changed(settings, drop, **tensors)
    return read_draft(checkpoint, settings, pair.target)


def first_logits(pair, draft):
    prompts = head_runs.PROMPTS[:1]
    return head_runs.record(pair.target, draft, 2, prompts=prompts, max_tokens=4)[0].logits


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0.", "model.midlayer."])
def test_spellings_of_the_first_layer(pair, prefix):
    """C2: midlayer. or layers.0., under model. or not: one model."""
    state = {n.replace("midlayer.", prefix): t for n, t in head_runs.head_state(CASE).items()}
    draft = read_draft(files.checkpoint(state), CASE.head, pair.target)
    for ours, theirs in zip(first_logits(pair, draft), first_logits(pair, pair.draft), strict=True):
        assert torch.equal(ours, theirs)


def test_every_tensor_is_loaded_or_named(pair):
    for name in CASE.shapes:
        spelled = name.replace("midlayer.", "layers.0.")
        match = f"lacks {spelled}" + ("," if name == "lm_head.weight" else "$")
        tiny.one_line_error(lambda name=name: read(pair, drop=[name]), CheckpointError, match)
    tiny.one_line_error(
        lambda: read(pair, **{"input_norm.weight": torch.ones(96)}),
        CheckpointError,
        "unknown tensors: input_norm.weight",
    )


def test_a_reduced_vocabulary(pair):
    """d2t holds offsets; the drafts are the target's ids; C1 d without a head."""
    assert pair.draft.vocab_size == 40
    assert torch.equal(pair.draft.vocab_map.d2t, head_runs.REDUCED)
    for drafted in head_runs.record(pair.target, pair.draft, 3, max_tokens=5):
        for token, logits in zip(drafted.drafts, drafted.logits, strict=True):
            assert logits.shape == (40,)
            assert token == head_runs.REDUCED[logits.argmax()]
    tiny.one_line_error(
        lambda: read(pair, drop=["lm_head.weight"]), CheckpointError, "lacks lm_head.weight"
    )


def test_maps_that_contradict_each_other_are_refused(pair):
    wrong = torch.zeros(101, dtype=torch.bool)
    wrong[:40] = True
    for edit, match in (
        ({"t2d": wrong}, "t2d does not mark the ids that d2t lists"),
        ({"drop": ["d2t"]}, "t2d does not mark the ids that d2t lists"),
        ({"d2t": torch.zeros(39, dtype=torch.int64)}, "d2t has 39 entries for 40 draft ids"),
        ({"d2t": torch.full((40,), 90)}, "d2t must list increasing ids of the target"),
    ):
        tiny.one_line_error(lambda edit=edit: read(pair, **edit), CheckpointError, match)
    assert read(pair, drop=["t2d"]).vocab_size == 40
    same = read(pair, drop=["d2t", "t2d"])  # no map: draft ids are the first target ids
    assert same.vocab_map is None
    assert same.vocab_size == 40


def test_a_whole_vocabulary_without_a_head_is_the_targets(pair):
    """C1 a: no lm_head, draft_vocab_size = vocab_size."""
    draft = read(pair, {"draft_vocab_size": 101}, drop=["lm_head.weight", "d2t", "t2d"])
    hidden = torch.randn(3, 32)
    assert torch.equal(draft.logits(hidden, 0), pair.target.logits(hidden))


def test_own_tables_win(pair):
    """C1 b: sentinel rows survive."""
    head = head_runs.head_state(CASE)["lm_head.weight"].clone()
    head[13] = 7.0
    embed = pair.target.embed.clone()
    embed[60] = 7.0
    draft = read(pair, **{"lm_head.weight": head, "embed_tokens.weight": embed})
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(draft.logits(hidden, 0)[:, 13], 7 * hidden.sum(-1))
    assert not torch.equal(first_logits(pair, draft)[0], first_logits(pair, pair.draft)[0])


def test_a_narrow_head_needs_its_own_tables():
    case = head_runs.HEADS["llama_eagle3_narrow"]
    pair = head_runs.load(case)
    state = head_runs.head_state(case)
    del state["embed_tokens.weight"]
    tiny.one_line_error(
        lambda: read_draft(files.checkpoint(state), case.head, pair.target),
        CheckpointError,
        "lacks embed_tokens.weight, and the target's of width 32 cannot stand in for 24",
    )
    settings = case.head | {"target_hidden_size": 40}
    tiny.one_line_error(
        lambda: read_draft(files.checkpoint(head_runs.head_state(case)), settings, pair.target),
        CheckpointError,
        "for a target of hidden size 40, and the target's is 32",
    )


@pytest.mark.parametrize("nested", [False, True])
def test_switches_of_the_config(pair, nested):
    """Each changes what is drafted; they lie at top level or in eagle_config."""

    def put(**switches):
        return {"eagle_config": switches} if nested else switches

    plain = first_logits(pair, pair.draft)
    for switches, tensors in (
        ({"norm_before_residual": True}, {}),
        ({"norm_output": True}, {}),
        ({"norm_before_fc": True}, {"input_norm.weight": torch.rand(96)}),
        ({"fc_norm": True}, {f"fc_norm.{j}.weight": torch.rand(32) for j in range(3)}),
    ):
        draft = read(pair, put(**switches), **tensors)
        logits = first_logits(pair, draft)
        assert not torch.allclose(logits[1], plain[1], rtol=1e-3)
        if "norm_output" in switches:
            assert torch.equal(logits[0], plain[0])
    both = put(norm_before_fc=True, fc_norm=True)
    tiny.one_line_error(
        lambda: read(pair, both), CheckpointError, "both norm_before_fc and fc_norm"
    )


def test_without_auxiliary_streams(pair):
    """use_aux_hidden_state = false: the same block over the target's last hidden state, no fc."""
    settings = {"eagle_config": {"use_aux_hidden_state": False}}
    draft = read(pair, settings, drop=["fc.weight"])
    assert draft.aux_layers == ()
    assert draft.config.axes.input_features == "last_hidden"
    assert len(first_logits(pair, draft)) == 2


def speculators(**overrides):
    """The same head in the layout of vllm-project/speculators."""
    layer = {k: v for k, v in CASE.head.items() if k not in ("architectures", "draft_vocab_size")}
    del layer["eagle_aux_hidden_state_layer_ids"]
    return {
        "architectures": ["Eagle3DraftModel"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "norm_before_residual": False,
        "transformer_layer_config": layer,
        **overrides,
    }


def test_the_speculators_layout(pair):
    state = {n.replace("midlayer.", "layers.0."): t for n, t in head_runs.head_state(CASE).items()}
    checkpoint = files.checkpoint(state)
    assert detect_head(speculators(), checkpoint) == "llama_eagle3"
    draft = read_draft(checkpoint, speculators(), pair.target)
    for ours, theirs in zip(first_logits(pair, draft), first_logits(pair, pair.draft), strict=True):
        assert torch.equal(ours, theirs)
    silent = {k: v for k, v in speculators().items() if k != "norm_before_residual"}
    assert eagle3_axes(silent, draft.config.axes).residual == "normed"


@pytest.mark.parametrize("name", ["llama_eagle3", "llama_eagle3_for_qwen3", "qwen3_eagle3"])
@pytest.mark.parametrize("batch", [1, 5])
def test_speculation_equals_plain_decoding(name, batch):
    pair = head_runs.load(head_runs.HEADS[name])
    asked = requests([*head_runs.PROMPTS, [50, 60, 70], [4] * 9], max_tokens=16)
    plain = generate(tiny_engine(pair.target, max_num_seqs=batch), asked)
    engine = tiny_engine(pair.target, pair.draft, autoregressive, max_num_seqs=batch)
    assert [r.token_ids for r in generate(engine, asked)] == [r.token_ids for r in plain]


@pytest.mark.parametrize("mode", ["sample", "shared"])
def test_sampled_drafts_stay_in_the_reduced_vocabulary(pair, mode):
    rule = rejection if mode == "sample" else partial(gumbel, noise="shared")
    engine = tiny_engine(pair.target, pair.draft, autoregressive, rule, draft_sampling=mode)
    results = generate(engine, requests(head_runs.PROMPTS, max_tokens=12, temperature=1.0))
    assert all(r.finish_reason in ("length", "stop") for r in results)


def test_a_prompt_past_the_heads_positions(pair, caplog):
    """K7: max_position_embeddings of 64 and a prompt of 100: one warning, the same text."""
    draft = read(pair, {"max_position_embeddings": 64})
    assert draft.max_position == 64
    asked = requests([[5 + i % 90 for i in range(100)]] * 2, max_tokens=20)
    plain = generate(tiny_engine(pair.target, max_model_len=256), asked)
    engine = tiny_engine(pair.target, draft, autoregressive, max_model_len=256)
    with caplog.at_level("WARNING", logger="specdec.engine"):
        results = generate(engine, asked)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "120 tokens and the draft head was made for 64" in warnings[0]
    assert sum(r.drafted for result in results for r in result.rounds) > 0
