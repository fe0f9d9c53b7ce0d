"""Binding of stages, choice of device and dtype, models shared in a process, sizes of an engine."""

import functools
import os

import pytest
import tiny
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from specdec import build, runtime
from specdec.bind import bind
from specdec.config import register_schemas
from specdec.errors import ConfigError
from specdec.generate import generate
from specdec.schedule import Request
from specdec.verify import rule


def stage(a, b, *, threshold, scale=1.0):
    return a, b, threshold, scale


def anything(a, b, **keywords):
    return keywords


def typed(
    a,
    b,
    *,
    rate: float,
    count: int | None = 3,
    word: str = None,  # noqa: RUF013 (as users write it)
    on: bool = False,
    more: list = (),
):
    return rate, count, word, on, more


def of_another_module(a, b, *, rate: "NotHere"):  # noqa: F821
    return rate


@rule(lossless=None, wants_draft_probs=True)
def wants_q(dist, drafts, keys):
    return None


def bare_proposer(state, batch, committed, out, draft, *, num_draft_tokens):
    return num_draft_tokens


def node(name, **keywords):
    return OmegaConf.create({"_target_": f"{__name__}.{name}", "_partial_": True, **keywords})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    import tiny_chat

    from specdec.models.load import load_target

    target = tiny_chat.write_chat_model(folder / "target")
    draft = tiny.write_draft(folder / "draft", load_target(target))
    return f"target.path={target}", f"draft.path={draft}", "dtype=float32", "device=cpu"


@pytest.fixture(autouse=True)
def _hydra():
    register_schemas()
    with initialize_config_module("specdec.conf", version_base="1.3"):
        yield


def composed(*overrides):
    return compose("config", overrides=list(overrides))


def test_bind_gives_a_plain_partial():
    bound = bind(node("stage", threshold=0.5), fn_args=("a", "b"))
    assert type(bound) is functools.partial
    assert bound.func is stage
    assert bound(1, 2) == (1, 2, 0.5, 1.0)
    fits = {"rate": 1, "count": None, "word": None, "on": True, "more": "anything"}
    assert bind(node("typed", **fits), fn_args=("a", "b")).keywords == fits
    assert bind(node("of_another_module", rate="x"), fn_args=("a", "b")).keywords == {"rate": "x"}
    nested = bind(node("anything", options={"x": [1]}), fn_args=("a", "b"))
    assert type(nested.keywords["options"]) is dict


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (node("stage", treshold=1), ("treshold", "did you mean 'threshold'", "threshold, scale")),
        (node("stage"), ("threshold", "needs")),
        (node("stage", threshold=1, a=1), ("verify.a", "threshold, scale")),
        (node("stag", threshold=1), ("stag", "did you mean", ".stage")),
        (node("typed", rate="hello"), ("verify.rate='hello' is not a float", "typed")),
        (node("typed", rate=None), ("verify.rate=None is not a float",)),
        (node("typed", rate=True), ("verify.rate=True",)),
        (node("typed", rate=1, count=2.5), ("verify.count=2.5 is not a int | None",)),
        (node("typed", rate=1, word=5), ("verify.word=5 is not a str",)),
        (node("typed", rate=1, on="yes"), ("verify.on='yes' is not a bool",)),
        ({"_target_": "no_such_package.rule"}, ("no_such_package", "PYTHONPATH")),
        ({"_target_": "specdec.verify.no_such_file.rule"}, ("specdec.verify.no_such_file",)),
        ({"_target_": "rule"}, ("rule", "dotted")),
        ({"_target_": None}, ("dotted",)),
        ({"_target_": "specdec.verify.PLACEHOLDER_TOKEN_ID"}, ("no function",)),
    ],
)
def test_bind_names_what_is_wrong(config, parts):
    with pytest.raises(ConfigError) as caught:
        bind(config, fn_args=("a", "b"), key="verify")
    for part in ("verify", *parts):
        assert part in str(caught.value)


def test_bind_wants_the_callers_arguments():
    with pytest.raises(ConfigError, match=r"\(dist, drafts, keys\)"):
        bind(node("stage", threshold=1), fn_args=("dist", "drafts", "keys"))


def test_bind_offers_only_what_is_taken():
    offered = {"scale": 3.0, "unknown": 1}
    taken = bind(node("stage", threshold=1), fn_args=("a", "b"), offered=offered)
    assert taken.keywords == {"threshold": 1, "scale": 3.0}
    given = bind(node("stage", threshold=1, scale=2.0), fn_args=("a", "b"), offered=offered)
    assert given.keywords["scale"] == 2.0


def test_an_import_that_fails_inside_a_users_module_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_rule_module.py").write_text("import numpyy\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="numpyy"):
        bind({"_target_": "broken_rule_module.rule"}, key="verify")


@pytest.mark.parametrize(
    ("overrides", "sampling"),
    [
        (["verify=rejection"], "sample"),
        (["verify=greedy"], "greedy"),
        (["verify=delta"], "greedy"),
        (["verify=gumbel"], "greedy"),
        (["verify=gumbel", "verify.noise=shared"], "shared"),
        (["verify=delta", "propose.draft_sampling=sample"], "sample"),
        (["verify=rejection", "propose.draft_sampling=greedy"], "greedy"),
        ([f"verify._target_={__name__}.wants_q"], "sample"),
    ],
)
def test_auto_draft_sampling_follows_the_rules_traits(overrides, sampling):
    bound = build.build_stages(composed(*overrides))
    assert bound.draft_sampling == sampling
    assert bound.stages.propose.keywords["draft_sampling"] == sampling


def test_a_proposer_may_lack_the_conveniences_but_not_what_was_set():
    target = f"propose._target_={__name__}.bare_proposer"
    bound = build.build_stages(composed(target))
    assert bound.stages.propose.keywords == {"num_draft_tokens": 4}
    assert bound.uses_draft is None
    with pytest.raises(ConfigError, match=r"propose\.temperature"):
        build.build_stages(composed(target, "propose.temperature=0.5"))


def test_plain_stages_draft_nothing():
    bound = build.plain_stages(composed("verify=gumbel", "propose.num_draft_tokens=5"))
    assert (bound.num_draft_tokens, bound.uses_draft) == (0, False)
    assert bound.stages.verify.func.__name__ == "gumbel"
    assert bound.stages.schedule.keywords["num_draft_tokens"] == 0


def test_jobs_share_models_and_leave_out_a_draft_that_is_not_used(pair):
    first = build.load_models(composed(*pair), uses_draft=True)
    again = build.load_models(composed(*pair, "sampling.temperature=1"), uses_draft=True)
    assert again.target is first.target
    assert again.draft is first.draft
    without = build.load_models(composed(*pair, "draft.path=/no/such/head"), uses_draft=False)
    assert without.draft is None
    assert without.target is first.target
    with pytest.raises(ConfigError, match=r"draft\.path is null"):
        build.load_models(composed(*pair, "draft.path=null"), uses_draft=True)


def test_the_engine_has_room_for_what_was_asked(pair):
    cfg = composed(*pair, "schedule.max_num_seqs=3", "propose.num_draft_tokens=4")
    bound = build.build_stages(cfg)
    models = build.load_models(cfg, uses_draft=True)
    engine = build.build_engine(cfg, models, bound, longest=50, num_requests=2)
    assert engine.limits.max_num_seqs == 2
    assert engine.limits.max_model_len == 50
    assert engine.limits.max_draft_tokens == 4
    requests = [Request(prompt_ids=(7, 8, 9), max_tokens=47, ignore_eos=True)] * 2
    results = generate(engine, requests)
    assert [len(r.token_ids) for r in results] == [47, 47]
    assert engine.num_preemptions == 0
    longer = build.build_engine(cfg, models, bound, longest=10**6, num_requests=1)
    assert longer.limits.max_model_len == 512  # the model's context


def test_a_limit_beyond_the_context_is_refused(pair):
    cfg = composed(*pair, "cache.max_model_len=513")
    with pytest.raises(ConfigError, match=r"cache\.max_model_len=513.*512"):
        build.context_length(cfg, build.load_models(cfg, uses_draft=True))
    cfg = composed(*pair, "cache.max_model_len=100")
    assert build.context_length(cfg, build.load_models(cfg, uses_draft=True)) == 100


def test_device_and_dtype():
    assert runtime.pick_device("cpu") == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert runtime.pick_device("auto").type == expected
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device=cuda"):
            runtime.pick_device("cuda")
    with pytest.raises(ConfigError, match="device=nowhere"):
        runtime.pick_device("nowhere")
    cpu = torch.device("cpu")
    assert runtime.pick_dtype("float32", cpu) is torch.float32
    fast = torch.bfloat16 if runtime.cpu_has_fast_bf16() else torch.float32
    assert runtime.pick_dtype("auto", cpu) is fast
    assert runtime.pick_dtype("auto", torch.device("cuda")) is torch.bfloat16


def test_threads(monkeypatch):
    target = tiny.tiny_target()
    before = torch.get_num_threads()
    try:
        assert runtime.use_threads(2, target) == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert runtime.use_threads(None, target) == 1  # whatever an earlier job asked for
        monkeypatch.delenv("OMP_NUM_THREADS")
        cores = len(os.sched_getaffinity(0))
        assert runtime.use_threads(None, target) in (1, cores)
    finally:
        torch.set_num_threads(before)
