"""What is said beside each setting, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import annotated_types
import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt

from raytf.config import keywords, setting
from raytf.config.flags import Strategy
from raytf.config.identity import OF_STRATEGY, batch_identity, strategy_identity
from raytf.config.precision import Precision
from raytf.config.setting import Expected, Identity, InSearch, Setting
from raytf.config.train_config import TrainConfig, as_keyword_arguments, every_setting
from raytf.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
NAMES = {its.name: its for its in every_setting()}


@dataclass(frozen=True)
class Section:
    count: Annotated[int | None, Ge(1)] = None
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    seconds: Annotated[float, Ge(0), Lt(math.inf)] = 1.0
    part: Annotated[float, Interval(ge=0.1, le=1), Expected("a tenth or more. Take more")] = 1.0
    word: Literal["a", "b"] | None = "a"
    free: str = ""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "--count 0: expected a number, 1 or more."),
        ("count", "3", "--count 3: expected a number, 1 or more."),
        ("count", 1.5, "--count 1.5: expected a whole number."),
        ("count", math.inf, "--count inf: expected a whole number."),
        ("count", math.nan, "--count nan: expected a number, 1 or more."),
        ("share", 0, "--share 0: expected a number above 0."),
        ("share", 1.5, "--share 1.5: expected at most 1."),
        ("seconds", math.inf, "--seconds inf: expected a finite number."),
        ("part", 0.01, "--part 0.01: expected a tenth or more. Take more."),
        ("part", 2, "--part 2: expected a tenth or more. Take more."),
        ("word", "c", "--word c: expected one of a, b."),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_the_words_of_its_bound(name: str, value: Any, message: str):
    with pytest.raises(ConfigError) as refused:
        setting.check(Section(**{name: value}))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "values", [{}, {"count": 1}, {"count": 7.0}, {"share": 1}, {"part": 0.1}, {"word": None}, {"word": "b"}], ids=str
)
def test_other_values_are_taken(values: dict[str, Any]):
    setting.check(Section(**values))


@pytest.mark.parametrize("its", every_setting(), ids=lambda its: its.name)
def test_each_number_of_a_run_has_a_bound_that_is_checked(its: Setting):
    if its.name == "replicas_to_aggregate":  # its bounds are 1 and the most workers
        return
    if its.kinds[0] in (int, float):
        assert its.bounds
    for bound in its.bounds:
        match bound:
            case Ge(ge=least):
                wrong: Any = least - 1
            case Gt(gt=least):
                wrong = least
            case Le(le=most):
                wrong = most + 1
            case Lt(lt=most):
                wrong = most
        strategy = "parameter-server" if its.name == "ps" else "mirrored"
        with pytest.raises(ConfigError, match=f"{its.flag} "):
            TrainConfig.among({"strategy": strategy, its.name: wrong}).check()
        with pytest.raises(ConfigError, match=f"{its.name}="):
            TrainConfig(**{its.name: wrong})
    if its.choices:
        with pytest.raises(ConfigError, match=f"{its.flag} x: expected one of {', '.join(its.choices)}"):
            TrainConfig.among({its.name: "x"}).check()


def test_a_bound_of_a_kind_that_is_never_checked_is_refused():
    with pytest.raises(TypeError, match="is not a bound"):
        setting.words(annotated_types.MultipleOf(2))


def test_which_strategies_take_a_setting():
    taken_by = {
        its.name: sorted(set(get_args(Strategy)) - {name for refused in its.refusals for name in refused.by})
        for its in every_setting()
        if its.refusals
    }
    everywhere_but_servers = sorted(set(get_args(Strategy)) - {"parameter-server"})
    assert taken_by == {
        "use_gpu": sorted(set(get_args(Strategy)) - {"tpu"}),
        "gpus_per_worker": ["multi-worker-mirrored", "one-device", "parameter-server", "tpu"],
        "communication": ["multi-worker-mirrored"],
        "overlap": ["multi-worker-mirrored"],
        "logical_devices": ["central-storage", "mirrored"],
        "ps": ["parameter-server"],
        "sync_replicas": ["parameter-server"],
        "replicas_to_aggregate": ["parameter-server"],
        **dict.fromkeys(
            (
                "mixed_precision",
                "exact",
                "compress_gradients",
                "audit_every",
                "log_device_placement",
                "snapshot_every_steps",
            ),
            everywhere_but_servers,
        ),
        **dict.fromkeys(("replace_stragglers", "resize_every_seconds", "steps_per_call"), everywhere_but_servers),
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ps": 2}, "--ps is only for parameter servers, but --strategy is multi-worker-mirrored. Pass --strategy "
         "parameter-server, or leave out --ps."),
        ({"strategy": "mirrored", "gpus_per_worker": 0.5}, "--gpus-per-worker 0.5 with --strategy mirrored: its one "
         "worker uses all GPUs of its machine. Leave it out, or pass --strategy multi-worker-mirrored."),
        ({"strategy": "tpu", "use_gpu": True}, "--use-gpu with --strategy tpu: a worker computes on one kind of "
         "device. Pass one of them."),
        ({"strategy": "parameter-server", "sync_replicas": True, "steps_per_call": 2}, "--steps-per-call with "
         "--strategy parameter-server: with --sync-replicas each step is a separate call. Leave it out."),
        ({"strategy": "parameter-server", "mixed_precision": "float16"}, "--mixed-precision float16 with --strategy "
         "parameter-server: all workers would write the loss scale at the same time; bfloat16 needs no loss scale. "
         "Leave it out."),
        ({"strategy": "one-device", "logical_devices": 2}, "--logical-devices 2 with --strategy one-device: only "
         "mirrored and central-storage share the work among devices of one machine. Leave it out, or pass --strategy "
         "mirrored."),
    ],
)  # fmt: skip
def test_a_strategy_that_does_not_take_a_setting_says_so(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as refused:
        TrainConfig.of(**settings).check()
    assert str(refused.value) == as_keyword_arguments(message)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_call": 2},
        {"sync_replicas": True, "steps_per_call": 1},
        {"mixed_precision": "bfloat16"},
        {"snapshot_every_steps": 0},
        {"resize_every_seconds": 60},
    ],
    ids=str,
)
def test_parameter_servers_take_what_they_can_follow(settings: dict[str, Any]):
    TrainConfig.of(strategy="parameter-server", global_batch_size=128, **settings).check()


#: Of runs made by commit 4e9a26f, whose settings were compared by code of their own.
BEFORE = {
    "--exact": "False", "--global-batch-size": "128", "--logical-shards": "4", "--mixed-precision": "off",
    "--reduction": "fixed", "--seed": "0", "training records": "1000",
}  # fmt: skip
MADE = [
    ({}, {}),
    ({"workers": "1:9", "seed": 7, "reduction": "float"},
     {"--logical-shards": "16", "--seed": "7", "--reduction": "float"}),
    ({"exact": True}, {"--exact": "True", "--cpus-per-worker": "1"}),
    ({"exact": True, "cpus_per_worker": 1.5}, {"--exact": "True", "--cpus-per-worker": "1.5"}),
    ({"cpus_per_worker": 4.0}, {}),
    ({"compress_gradients": True}, {"--compress-gradients": "True"}),
    ({"mixed_precision": "bfloat16"}, {"--mixed-precision": "bfloat16"}),
    ({"scale_learning_rate": "sqrt", "base_batch_size": 32, "warmup_epochs": 2.5},
     {"--scale-learning-rate": "sqrt from --base-batch-size 32", "--warmup-epochs": "2.5"}),
    ({"strategy": "mirrored", "logical_devices": 8}, {"--logical-shards": "8"}),
    ({"strategy": "parameter-server", "ps": 2},
     {"--logical-shards": "1", "--strategy": "parameter-server", "--sync-replicas": "False"}),
    ({"strategy": "parameter-server", "sync_replicas": True},
     {"--strategy": "parameter-server", "--sync-replicas": "True"}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "more"), MADE, ids=lambda case: str(case))
def test_the_identity_equals_that_of_runs_from_before_it_came_from_fields(
    settings: dict[str, Any], more: dict[str, str]
):
    config = TrainConfig.of(**settings)
    assert batch_identity(config, 1000) == BEFORE | more
    assert strategy_identity(config) == {key: text for key, text in more.items() if key in OF_STRATEGY}


def test_a_policy_of_the_job_is_in_the_identity_of_before():
    own = Precision("mixed_bfloat16", "float32")
    assert batch_identity(TrainConfig(), 1000, own) == BEFORE | {"--mixed-precision": "bfloat16"}
    other = batch_identity(TrainConfig(), 1000, Precision("mixed_x", "float16"))
    assert other == BEFORE | {"dtype policy": "mixed_x", "floatx": "float16"}


def test_what_belongs_to_the_identity_within_another_text_is_in_that_text():
    for its in every_setting():
        identity = its.identity
        if identity is not None and identity.within is not None:
            outer = NAMES[identity.within].identity
            assert isinstance(outer, Identity)
            assert f"{{{its.name}}}" in str(outer.text)


def test_what_belongs_to_a_search():
    def of(what: InSearch) -> list[str]:
        return [its.name for its in every_setting() if what in its.in_search]

    assert of(InSearch.OWNED) == ["run", "new", "storage", "status_file"]
    assert of(InSearch.NEEDED) == ["workers", "cpus_per_worker"]
    assert of(InSearch.SIZES) == ["workers", "strategy", "sync_replicas", "replicas_to_aggregate", "logical_shards"]
    assert of(InSearch.KEPT) == ["epochs", "steps", "jit"]


def test_the_keyword_arguments_are_the_settings():
    assert keywords.Settings.__optional_keys__ == set(NAMES)
    assert set(NAMES) - keywords.FitSettings.__optional_keys__ == {"global_batch_size", "epochs", "verbose"}


def test_the_reference_page_has_every_setting():
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("### ")] == [
        f"### `{its.flag}`" for its in every_setting()
    ]
