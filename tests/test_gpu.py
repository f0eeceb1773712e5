"""On a real CUDA device: strategies are right there, peaks are CUDA's own and predicted, out of memory is a result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from sweep.config.check import typed
from sweep.memory.device import resolve_device
from sweep.results import TrialResult
from sweep.trial.process import run_isolated
from sweep.trial.verify import verify
from sweep.workload import build_data

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = sorted(path.stem for path in (ROOT / "conf/strategy").glob("*.yaml"))
SMALL = ["workload=gpt2_124m", "workload.seq_len=256", "workload.model.layers=4", "workload.global_batch_size=8"]


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    assert torch.cuda.is_available(), "these tests need a CUDA device"
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def trial(folder: Path, *overrides: str) -> TrialResult:
    config = typed(compose("config", [*SMALL, "measure=quick", *overrides]))
    config.device = resolve_device(config.device)
    return run_isolated(config, config.strategy.name, folder)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "amp_bf16"])
def test_every_strategy_is_equivalent_on_cuda(strategy: str, dtype: str) -> None:
    config = typed(compose("config", [*SMALL, f"strategy={strategy}", f"workload.dtype={dtype}"]))
    found = verify(config, torch.device("cuda"), build_data(config.workload))
    assert found.passed, found.reason


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_peak_is_cudas_own_and_was_predicted(strategy: str, tmp_path: Path) -> None:
    result = trial(tmp_path, f"strategy={strategy}")
    assert result.outcome == "ok", result.details
    assert result.measurement is not None
    assert result.measurement.peak_reserved_mib is not None
    assert result.measurement.peak_reserved_mib >= result.measurement.peak_allocated_mib > 0
    assert result.prediction is not None, result.prediction_error
    assert result.prediction.error_ratio == pytest.approx(0, abs=0.02)


def test_out_of_memory_is_a_result_and_the_next_trial_is_clean(tmp_path: Path) -> None:
    full = trial(tmp_path / "a", "strategy=baseline", "device.capacity_mib=1100")
    assert full.outcome == "oom_device", full.error
    assert trial(tmp_path / "b", "strategy=baseline").outcome == "ok"


def test_offload_moves_bytes_and_lowers_the_peak(tmp_path: Path) -> None:
    baseline, offload = trial(tmp_path / "a", "strategy=baseline"), trial(tmp_path / "b", "strategy=offload")
    assert baseline.measurement is not None
    assert offload.measurement is not None, offload.details
    assert offload.measurement.to_host_mib > 0
    assert offload.measurement.from_host_mib == pytest.approx(offload.measurement.to_host_mib, rel=0.01)
    assert offload.measurement.peak_allocated_mib < baseline.measurement.peak_allocated_mib
