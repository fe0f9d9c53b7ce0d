"""The configuration: keys, defaults, every option of every group, one line for each mistake."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

import specdec.conf
from specdec.bind import bind
from specdec.build import build_stages
from specdec.checks import check_keys, check_values, config_hash, normalise_, one_line, plain
from specdec.config import register_schemas
from specdec.errors import SpecdecError
from specdec.experiments.acceptance import bind_prompts

GROUPS = (
    *("target", "draft", "model", "schedule", "verify", "postprocess", "propose"),
    *("sampling", "cache", "kernels", "data", "logger"),
)


@pytest.fixture(scope="module", autouse=True)
def _hydra():
    register_schemas()
    with initialize_config_module("specdec.conf", version_base="1.3"):
        yield


def composed(*overrides):
    return compose("config", overrides=list(overrides))


def options():
    root = Path(specdec.conf.__file__).parent
    return [f"{group}={file.stem}" for group in GROUPS for file in sorted((root / group).iterdir())]


def complaint(*overrides):
    """The line that a user sees for these overrides."""
    try:
        cfg = composed(*overrides)
        check_keys(cfg)
        check_values(cfg)
        build_stages(cfg)
        bind_prompts(cfg)
        bind(cfg.logger, fn_args=("job",))
    except (HydraException, OmegaConfBaseException, SpecdecError, ValueError) as error:
        line = one_line(error)
        assert line is not None
        assert "\n" not in line
        return line
    return None


def test_defaults():
    config = plain(composed())
    assert config["sampling"] == {
        "temperature": 0.0,
        "top_k": None,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": 128,
        "seed": 0,
        "ignore_eos": False,
        "num_samples": 1,
    }
    assert config["propose"]["_target_"] == "specdec.propose.autoregressive.autoregressive"
    assert config["propose"]["num_draft_tokens"] == 4
    assert config["propose"]["draft_sampling"] == "auto"
    assert config["propose"]["temperature"] is None
    assert config["verify"]["_target_"] == "specdec.verify.rejection.rejection"
    assert config["data"]["_target_"] == "specdec.prompts.builtin"
    assert config["data"]["turns"] == "first"
    assert config["data"]["num_prompts"] is None
    assert config["data"]["chat_template"] is None
    assert config["data"]["system_prompt"] is None
    assert config["logger"]["_target_"] == "specdec.experiments.loggers.wandb_run"
    assert config["measure_baseline"] is False
    assert (config["device"], config["dtype"], config["seed"]) == ("auto", "auto", 0)
    assert config["draft"]["path"] == "pretrained/smollm2_135m_eagle"
    assert complaint() is None


@pytest.mark.parametrize("option", options())
def test_every_option_composes_checks_and_binds(option):
    assert complaint(option) is None
    json.dumps(plain(composed(option)), allow_nan=False)


def test_named_sets_are_all_there():
    names = {option.removeprefix("data=") for option in options() if option.startswith("data=")}
    assert names >= {"builtin", "jsonl", "mt_bench", "spec_bench", "humaneval", "gsm8k"}


def test_a_preset_chooses_and_an_override_wins():
    ngram = composed("model=llama_ngram")
    assert ngram.propose._target_.endswith("ngram")
    assert ngram.draft.path is None
    assert composed("model=llama_ngram", "propose=none").propose._target_.endswith("none.none")
    assert composed("draft=none").draft.path is None


def test_the_seed_reaches_sampling_unless_it_has_its_own():
    assert composed("seed=7").sampling.seed == 7
    assert composed("seed=7", "sampling.seed=9").sampling.seed == 9


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("propose.num_spec_tokns=4", "did you mean 'num_draft_tokens'"),
        ("sampling.temprature=1", "did you mean 'temperature'"),
        ("sampling.temperature.value=1", "sampling.temperature"),
        ("smapling.temperature=1", "smapling"),
        ("measure_base=true", "did you mean 'measure_baseline'"),
        ("propose.method=ngram", "propose.method"),
        ("verify.treshold=3", "verify.treshold"),
        ("propose.num_speculative_tokens=4", "propose.num_draft_tokens"),
        ("data.turn=all", "did you mean 'turns'"),
        ("model.family=llama", "model"),
    ],
)
def test_an_unknown_key_is_refused_in_every_spelling(prefix, override, named):
    line = complaint(prefix + override)
    assert line is not None, "accepted"
    assert named in line
    key = override.partition("=")[0]
    assert key.rpartition(".")[2] in line or key.partition(".")[0] in line


@pytest.mark.parametrize("override", ["verify=null", "verify=5", "verify=true"])
def test_a_group_takes_the_name_of_an_option(override):
    line = complaint(override)
    assert override in line
    assert "delta, greedy, gumbel, rejection" in line


def test_an_unknown_mode_of_wandb_is_named(tmp_path, monkeypatch):
    from specdec.experiments.loggers import JobInfo, wandb_run

    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with (
        pytest.raises(SpecdecError, match=r"^WANDB_MODE=sometimes is unknown"),
        wandb_run(JobInfo(tmp_path, {}, "run", None, "eval")),
    ):
        pass


def test_a_group_that_is_chosen_already_takes_no_plus():
    assert "verify=, without a +" in complaint("+verify=greedy")


def test_a_target_that_is_no_function_of_ours():
    assert "no signature" in complaint("verify._target_=builtins.max")
    assert "MODULE.FUNCTION" in complaint("verify._target_=.rules.mine")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        (tmp_path / "file" / "run").mkdir(parents=True)
    line = one_line(caught.value)
    assert str(tmp_path / "file" / "run") in line
    assert "hydra.run.dir" in line


def test_an_unknown_option_names_the_known_ones():
    line = complaint("propose=ngrm")
    assert "propose=ngrm" in line
    assert "did you mean 'ngram'" in line
    assert "autoregressive, ngram, none" in line


@pytest.mark.parametrize(
    "override",
    [
        *("sampling.temperature=-3", "sampling.temperature=nan", "sampling.temperature=inf"),
        *("sampling.temperature=warm", "sampling.temperature=null"),
        *("sampling.top_p=0", "sampling.top_p=7", "sampling.top_p=-0.1", "sampling.top_p=nan"),
        *("sampling.top_k=99999999999999999999", "num_threads=100000", "cache.block_size=1000000"),
        *("target.path=''", "draft.path=' '", "logger.project=a/b"),
        *("sampling.top_k=-5", "sampling.top_k=1.5", "sampling.min_p=2", "sampling.min_p=-1"),
        *("sampling.repetition_penalty=0", "sampling.presence_penalty=2.5"),
        *("sampling.frequency_penalty=nan", "sampling.frequency_penalty=null"),
        *("sampling.max_tokens=0", "sampling.max_tokens=-1", "sampling.max_tokens=many"),
        *("sampling.seed=18446744073709551616", "sampling.num_samples=0"),
        *("propose.num_draft_tokens=-1", "propose.num_draft_tokens=x"),
        *("propose.draft_sampling=always", "propose.temperature=-1"),
        *("schedule.max_num_seqs=0", "schedule.max_num_batched_tokens=0", "cache.block_size=0"),
        *("data.num_prompts=0", "data.num_prompts=some", "data.turns=second"),
        *("device=tpu", "dtype=float16", "num_threads=0", "logger.mode=always"),
        *("kernels.backend=tritn",),
    ],
)
def test_a_bad_value_is_named_with_its_key(override):
    line = complaint(override)
    key, _, value = override.partition("=")
    assert line is not None, "accepted"
    assert key in line
    if value != "null":
        assert value.strip("'") in line


@pytest.mark.parametrize(
    ("config", "override"),
    [
        ("train_mtp", "unroll.num_steps=0"),
        ("train_mtp", "log_every=0"),
        ("train_mtp", "optimizer.lr=nan"),
        ("train_mtp", "budget.max_steps=-1"),
        ("generate", "prompts.passes=0"),
        ("generate", "num_processes=0"),
        ("serve", "drain_seconds=-1"),
    ],
)
def test_a_bad_value_of_another_script(config, override):
    from specdec.serving.config import register as register_serving
    from specdec.training.config import register as register_training

    register_training()
    register_serving()
    check_values(compose(config))
    with pytest.raises(SpecdecError, match=rf"^{override} must be"):
        check_values(compose(config, overrides=[override]))


@pytest.mark.parametrize(
    "overrides",
    [
        ("propose=ngram", "propose.min_ngram=3", "propose.max_ngram=2"),
        ("verify=greedy", "sampling.temperature=0.5"),
        ("verify=gumbel", "verify.noise=loud"),
        ("verify=gumbel", "verify.noise=shared", "propose.draft_sampling=greedy"),
    ],
)
def test_a_combination_that_cannot_run_is_refused(overrides):
    line = complaint(*overrides)
    assert line is not None
    assert overrides[-1].partition("=")[2] in line


@pytest.mark.parametrize("value", ["null", "0", "-1", "40"])
def test_top_k_off_is_spelled_in_every_common_way(value):
    assert complaint(f"sampling.top_k={value}") is None


def test_a_value_with_a_blank_arrives_whole():
    assert composed('data.system_prompt="one two"').data.system_prompt == "one two"


def test_plain_decoding_records_no_drafts():
    cfg = composed("propose=none", "propose.num_draft_tokens=4")
    normalise_(cfg)
    assert cfg.propose.num_draft_tokens == 0
    kept = composed("propose=ngram", "propose.num_draft_tokens=3")
    normalise_(kept)
    assert kept.propose.num_draft_tokens == 3


def test_plain_configurations_are_resolved_and_hash_by_value():
    config = plain(composed("sampling.temperature=0.7"))
    assert config["sampling"]["temperature"] == 0.7
    assert isinstance(config["sampling"]["temperature"], float)
    assert "${" not in json.dumps(config)
    assert config_hash(config) == config_hash(plain(composed("sampling.temperature=0.70")))
    assert config_hash(config) != config_hash(plain(composed("sampling.temperature=0.8")))


def test_a_missing_value_is_named():
    assert "target.path" in complaint("target.path=???")
    assert "foo" in complaint("sampling.seed=${foo}")


def test_errors_that_are_not_the_users_are_left_alone():
    assert one_line(ValueError("a bug")) is None
    assert one_line(KeyError("a bug")) is None
