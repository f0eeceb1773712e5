"""Every yaml composes into the typed config, and every option of a group works with the defaults of the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from sweep.config.check import typed
from sweep.config.schema import Config
from sweep.errors import BadInput

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = ("workload", "strategy", "budget", "device", "measure")
STRATEGIES = {"baseline", "micro_batch", "checkpoint", "checkpoint_selective", "offload", "hybrid"}


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def config(*overrides: str) -> Config:
    return typed(compose("config", list(overrides)))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize(("group", "option"), [(g, o) for g in GROUPS for o in options(g)])
def test_every_yaml_composes(group: str, option: str) -> None:
    found = config(f"{group}={option}")
    if group in ("workload", "strategy", "device"):
        assert getattr(found, group).name == option


def test_glob_compares_exactly_the_six_strategies() -> None:
    assert set(options("strategy")) == STRATEGIES


@pytest.mark.parametrize("option", options("workload"))
def test_micro_batch_is_a_quarter_of_every_workloads_global_batch(option: str) -> None:
    found = config(f"workload={option}", "strategy=micro_batch")
    assert found.strategy.micro_batch_size == -(-found.workload.global_batch_size // 4)


BAD = [
    (["strategy=micro_batch", "strategy.micro_batch_size=0"], "strategy.micro_batch_size=0"),
    (["strategy=micro_batch", "strategy.micro_batch_size=17"], "strategy.micro_batch_size=17"),
    (["strategy=checkpoint", "strategy.checkpoint.every_k=0"], "strategy.checkpoint.every_k=0"),
    (["strategy=checkpoint", "strategy.checkpoint.granularity=parts"], "strategy.checkpoint.parts=[]"),
    (["strategy=offload", "strategy.offload.placement=blocks"], "strategy.offload.blocks=null"),
    (["strategy=offload", "strategy.offload.min_tensor_kib=-1"], "strategy.offload.min_tensor_kib=-1"),
    (["budget.memory_mib=-1"], "budget.memory_mib=-1"),
    (["budget.memory_mib=0"], "budget.memory_mib=0"),
    (["budget.min_throughput_ratio=-0.1"], "budget.min_throughput_ratio=-0.1"),
    (["budget.memory_mib=nan"], "budget.memory_mib=nan"),
    (["device.capacity_mib=0"], "device.capacity_mib=0"),
    (["device.type=tpu"], "device.type=tpu"),
    (["measure.steps=0"], "measure.steps=0"),
    (["measure.repeats=0"], "measure.repeats=0"),
    (["measure.timeout_s=0"], "measure.timeout_s=0"),
    (["workload.global_batch_size=0"], "workload.global_batch_size=0"),
    (["workload.optimizer.lr=0"], "workload.optimizer.lr=0"),
]


@pytest.mark.parametrize(("overrides", "begins"), BAD, ids=[b for _, b in BAD])
def test_values_that_are_wrong_by_themselves(overrides: list[str], begins: str) -> None:
    with pytest.raises(BadInput) as caught:
        config(*overrides)
    message = str(caught.value)
    assert message.startswith(begins)
    assert ": " in message
    assert "; " in message
    assert "\n" not in message
