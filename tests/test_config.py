"""A config that makes no sense is refused by the path of its key, with the nearest that does."""

import inspect
import pickle
from fractions import Fraction
from typing import Any

import pytest
import yaml

from lockstep import RunConfig
from lockstep.config import Cadence
from lockstep.errors import ConfigError
from lockstep.plan import BatchConfig
from lockstep.step.train_step import TrainStep


def refusal(values: dict[str, object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(values)
    return caught.value


def test_an_unknown_key_is_named_with_the_nearest_good_one() -> None:
    error = refusal({"epoch": 3})
    assert "'epoch'" in error.problem
    assert error.remedy == "use epochs"


@pytest.mark.parametrize(
    "values",
    [
        {"epoch": 3},
        {"batch": {"batch_sise": 3}},
        {"epochs": 0, "seed": "x"},
        {"exact": True, "sync_batch_norm": True},
        {"seed": 2**70},
    ],
)
def test_the_constructor_refuses_in_the_words_of_parse(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**values)
    assert str(caught.value) == str(refusal(values))


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("lr", "use rate.lr"),
        ("batch_size", "use batch.batch_size or evaluation.batch_size"),
        ("num_workers", "use loader.num_workers"),
    ],
)
def test_a_key_of_a_section_is_named_with_the_section(key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**{key: 1})
    assert caught.value.problem == f"unknown key {key!r} at the top level"
    assert caught.value.remedy == remedy


def test_a_key_that_is_no_text_is_refused_too() -> None:
    values: Any = {1: 2}
    assert refusal(values).problem == "1: keys should be strings"


def test_a_config_survives_copies_and_pickling() -> None:
    config = RunConfig(epochs=3, batch=BatchConfig(batch_size=8))
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.model_copy(update={"epochs": 4}) == RunConfig(epochs=4, batch=config.batch)
    assert RunConfig.parse(config.model_dump(mode="json")) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_an_unknown_nested_key_is_named_by_its_path() -> None:
    error = refusal({"batch": {"batch_sise": 3}})
    assert error.problem == "unknown key 'batch_sise' in section batch"
    assert error.remedy == "use batch_size"


def test_a_key_like_no_other_gets_the_list_of_those_there_are() -> None:
    error = refusal({"rate": {"zzz": 1}})
    assert error.remedy == "use one of lr, lr_scaling, reference_batch"


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"epochs": "many"}, "epochs='many'"),
        ({"epochs": 0}, "epochs=0"),
        ({"batch": {"batch_size": -1}}, "batch.batch_size=-1"),
        ({"rate": {"lr": "fast"}}, "rate.lr='fast'"),
        ({"schedule": {"shape": "square"}}, "schedule.shape='square'"),
        ({"batch": 3}, "batch=3"),
        ({"evaluation": {"every_epochs": 0}}, "evaluation.every_epochs=0"),
        ({"checkpoint": {"every_epochs": -0.5}}, "checkpoint.every_epochs=-0.5"),
        ({"checkpoint": {"every_epochs": float("inf")}}, "checkpoint.every_epochs=inf"),
        ({"compile": "graph"}, "compile='graph': Input should be a valid boolean"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(values: dict[str, object], path: str) -> None:
    assert refusal(values).problem.startswith(path)


def test_the_old_name_of_a_value_is_still_accepted() -> None:
    old = RunConfig.parse({"checkpoint": {"on_failed_save": "go_on"}})
    assert old.checkpoint.on_failed_save == "continue"


def test_several_mistakes_are_counted() -> None:
    assert "and 1 more" in refusal({"epochs": 0, "seed": "x"}).problem


def test_a_value_of_one_kind_or_another_is_one_mistake_and_both_are_told() -> None:
    refused = refusal({"compile": "graph"})
    assert refused.problem.endswith("or Input should be 'graphs'")
    assert refused.remedy == "correct compile"


def test_settings_that_contradict_each_other_are_named_with_what_to_set() -> None:
    refused = refusal({"exact": True, "parallel": "fsdp"})
    assert refused.problem == "exact=true sums whole gradients, and parallel=fsdp shards them"
    assert refused.remedy == "set parallel=ddp, or exact=false"


def test_a_rate_that_yaml_reads_as_text_is_a_number() -> None:
    values = yaml.safe_load("rate: {lr: 1e-4}")
    assert values["rate"]["lr"] == "1e-4", "PyYAML reads it so"
    assert RunConfig.parse(values).rate.lr == 1e-4


def test_accumulate_and_global_batch_size_are_not_given_both() -> None:
    error = refusal({"batch": {"accumulate": 2, "global_batch_size": 64}})
    problem = "batch: accumulate=2 and global_batch_size=64 both set the size of a step"
    assert error.problem == problem
    assert error.remedy == "set one of them, not both"
    RunConfig.parse({"batch": {"global_batch_size": 64}})


def test_overrides_reach_into_sections_and_are_checked_like_the_rest() -> None:
    config = RunConfig.parse({"epochs": 3})
    changed = config.with_overrides(
        ["rate.lr=1e-3", "batch.batch_size=8", "averages=[0.9, 0.99]", "max_grad_norm=null"]
    )
    assert changed.rate.lr == 1e-3
    assert changed.batch.batch_size == 8
    assert changed.averages == (0.9, 0.99)
    assert changed.max_grad_norm is None
    assert changed.epochs == 3
    assert config.rate.lr == 1e-4, "the first one is as it was"


@pytest.mark.parametrize(
    "texts",
    [
        ["checkpoint.every_steps=100"],
        ["checkpoint={every_steps: 100}"],
        ["checkpoint={keep_last: 3}", "checkpoint.every_steps=100"],
    ],
)
def test_an_override_means_what_the_same_key_in_a_settings_file_means(texts: list[str]) -> None:
    in_file = RunConfig.parse({"epochs": 3, "checkpoint": {"every_steps": 100}})
    assert in_file.checkpoint.every_epochs is None
    assert RunConfig(epochs=3).with_overrides(texts) == in_file


def test_an_override_keeps_what_was_set_before() -> None:
    config = RunConfig.parse({"checkpoint": {"every_epochs": 0.5, "keep_last": 7}})
    changed = config.with_overrides(["checkpoint.every_steps=100"]).checkpoint
    assert (changed.every_epochs, changed.every_steps, changed.keep_last) == (0.5, 100, 7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("checkpoint.ever.steps=3", "ever"),
        ("batch.batch_sise=3", "batch_sise"),
        ("bach.batch_size=3", "bach"),
        ("epochs.number=3", "epochs"),
        ("epochs", "does not set anything"),
        ("epochs=soon", "epochs='soon'"),
    ],
)
def test_a_bad_override_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RunConfig.parse({"epochs": 3}).with_overrides([text])


def test_a_config_survives_being_written_to_the_run_folder() -> None:
    config = RunConfig.parse({"epochs": 3, "averages": [0.9], "batch": {"global_batch_size": 64}})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_config_cannot_be_changed_under_way() -> None:
    config = RunConfig.parse({"epochs": 3})
    with pytest.raises(ValueError, match="frozen"):
        config.epochs = 4  # type: ignore[misc]


def test_a_cadence_counts_epochs_or_steps_or_both() -> None:
    epochs = {3: 1, 6: 2, 9: 3, 12: 4}

    def due(when: Cadence) -> list[int]:
        return [step for step in range(1, 13) if when.is_due(step, epochs.get(step))]

    assert due(Cadence(every_steps=4)) == [4, 8, 12]
    assert due(Cadence(every_epochs=1, every_steps=4)) == [3, 4, 6, 8, 9, 12]
    assert due(Cadence(every_epochs=2)) == [6, 12]
    assert due(Cadence(every_epochs=None)) == []


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0.5, [3, 5, 8, 10]),  # of five steps an epoch, at the first that is past the middle
        (0.1, list(range(1, 11))),  # never twice in a step
        (0.2, list(range(1, 11))),
        (1.5, [8]),
        (1, [5, 10]),
        (2.0, [10]),
        (1e9, []),
    ],
)
def test_a_cadence_may_be_a_fraction_of_an_epoch(every: float, expected: list[int]) -> None:
    when, share = Cadence(every_epochs=every), Fraction(1, 5)
    assert [n for n in range(1, 11) if when.is_due(n, n * share, share)] == expected


def test_a_fraction_means_what_was_written_not_the_float_next_to_it() -> None:
    when = Cadence(every_epochs=0.1)  # as a float a little more than a tenth
    tenth = Fraction(1, 10)
    due = [n for n in range(1, 10_001) if when.is_due(n, n * tenth, tenth)]
    assert len(due) == 10_000


def test_both_entrances_clip_nothing_unless_asked() -> None:
    default = inspect.signature(TrainStep).parameters["max_grad_norm"].default
    assert RunConfig().max_grad_norm is default is None
