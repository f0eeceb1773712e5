"""Measuring: what the numbers are made of, and what stops a measurement."""

from __future__ import annotations

import math
import statistics
import time
from functools import cache
from typing import Any

import pytest
import torch
from small_workloads import config, data_of
from torch import Tensor

import sweep.strategy as strategy_module
import sweep.trial.measure as module
from sweep.config.schema import Config
from sweep.errors import DeviceOutOfMemory, NotFinite, NothingOffloaded, TimedOut
from sweep.memory.ledger import Ledger
from sweep.results import Evidence, Measurement, Phase, Run, from_dict, to_dict
from sweep.trial.measure import (
    CpuClock,
    evaluate,
    evidence_of,
    measure,
    memory_pass,
    quartiles,
    repeat,
    round_config,
    rounds_of,
    steps_of,
    summary,
)
from sweep.workload import build_workload
from sweep.workload.step import Phases

CPU = torch.device("cpu")


def run(c: Config, **more: Any) -> Measurement:
    return measure(c, CPU, data_of(c.workload), **more)


# -- what is reported ------------------------------------------------------------------------------------------------


def test_a_measurement_adds_up() -> None:
    c = config("gpt", "offload", measure={"warmup_steps": 2, "steps": 3, "repeats": 4})
    seen: list[tuple[int, int, str]] = []
    m = run(c, progress=lambda *report: seen.append(report))
    assert (m.evidence, m.steps, m.repeats) == ("cpu", 3, 4)
    (only,) = m.runs  # repeats at once are one run of all their steps
    assert only.step_times_ms == m.step_times_ms
    assert len(m.step_times_ms) == 12
    assert m.step_ms == statistics.median(m.step_times_ms)
    assert min(m.step_times_ms) <= m.step_ms_low <= m.step_ms <= m.step_ms_high <= max(m.step_times_ms)
    assert m.samples_per_s == pytest.approx(8 / m.step_ms * 1000)
    assert m.tokens_per_s == pytest.approx(16 * m.samples_per_s)
    assert len(m.train_loss) == 2 + 12
    assert m.peak_reserved_mib is None
    assert m.peak is not None
    assert m.peak_allocated_mib == m.peak.mib == pytest.approx(sum(m.peak.at_peak_mib.values()))
    assert m.to_host_mib == m.from_host_mib > 0  # of one step
    assert m.peak.host_peak_mib > 0
    assert set(m.phases_ms) == {"data", "forward", "backward", "optimizer", "transfer"}
    total = steps_of(c)
    assert [done for done, _, _ in seen] == list(range(1, total + 1))
    assert {of for _, of, _ in seen} == {total} == {2 + 12 + 2}
    assert from_dict(Measurement, to_dict(m)) == m


def test_bytes_moved_are_those_of_one_step_whatever_the_number_of_steps() -> None:
    moved = [
        run(config("gpt", "offload", measure={"warmup_steps": warmup, "steps": steps, "repeats": 1})).to_host_mib
        for warmup, steps in ((0, 1), (3, 1), (1, 3))
    ]
    assert moved[0] > 0
    assert len(set(moved)) == 1


def test_phase_times_are_exclusive_and_sum_to_the_step() -> None:
    m = run(config("gpt", "hybrid", measure={"steps": 8, "repeats": 1}))
    assert {"recompute", "transfer"} <= set(m.phases_ms)
    together = sum(m.phases_ms.values())
    assert 0.7 * m.step_ms < together < 1.3 * m.step_ms  # medians of parts need not add up exactly


def test_without_a_sequence_length_there_are_no_tokens() -> None:
    m = run(config("vit", measure={"ledger": False, "steps": 1, "repeats": 1}))
    assert m.tokens_per_s is None
    assert m.peak is None
    assert math.isnan(m.peak_allocated_mib)
    assert to_dict(m)["peak_allocated_mib"] is None


def test_one_step_is_enough() -> None:
    m = run(config("gpt", measure={"warmup_steps": 0, "steps": 1, "repeats": 1, "eval_batches": 0}))
    assert m.step_ms == m.step_ms_low == m.step_ms_high
    assert m.eval_loss is None
    assert m.eval_loss_before is None
    assert len(m.train_loss) == 1


@pytest.mark.parametrize(("values", "expected"), [
    ([5.0], (5, 5)), ([1.0, 3.0], (1.5, 2.5)), ([4.0, 1.0, 2.0, 3.0, 5.0], (2, 4)), ([7.0] * 9, (7, 7)),
])  # fmt: skip
def test_quartiles(values: list[float], expected: tuple[float, float]) -> None:
    assert quartiles(values) == expected


@pytest.mark.parametrize(("on_cuda", "warmup", "steps", "repeats", "expected"), [
    (False, 9, 891, 9, Evidence.cpu), (False, 0, 1, 1, Evidence.cpu), (True, 2, 10, 2, Evidence.measured),
    (True, 2, 15, 3, Evidence.measured), (True, 1, 15, 3, Evidence.smoke), (True, 2, 9, 3, Evidence.smoke),
    (True, 2, 100, 1, Evidence.smoke), (True, 0, 1, 1, Evidence.smoke),
])  # fmt: skip
def test_evidence(on_cuda: bool, warmup: int, steps: int, repeats: int, expected: Evidence) -> None:
    assert evidence_of(on_cuda, warmup, steps, repeats) is expected


# -- repeats ---------------------------------------------------------------------------------------------------------


def test_the_first_round_is_one_run_of_the_steps_of_one_repeat() -> None:
    c = config("gpt", "offload", measure={"warmup_steps": 2, "steps": 3, "repeats": 4})
    seen: list[tuple[int, int, str]] = []
    m = run(c, first_round=True, progress=lambda *report: seen.append(report))
    (only,) = m.runs
    assert (only.index, only.seed, only.at_end, only.fresh_process) == (0, 3, False, False)
    assert len(only.step_times_ms) == 3
    assert (m.steps, m.repeats) == (3, 1)
    assert seen[-1][:2] == (2 + 3 + 2,) * 2
    assert (m.train_loss, m.eval_loss) == (only.train_loss, only.eval_loss)
    assert len(only.train_loss) == 5
    assert only.started_at.endswith("+00:00")
    assert only.conditions is not None


def test_a_repeat_computes_the_same_and_measures_anew() -> None:
    c = config("convnet", "checkpoint", measure={"steps": 3, "repeats": 3})
    first = run(c, first_round=True).runs[0]
    again = repeat(c, CPU, None, 2, lambda what: None)
    assert (again.index, again.seed) == (2, first.seed)
    assert again.train_loss == first.train_loss
    assert again.step_times_ms != first.step_times_ms
    assert again.eval_loss is None  # this seed was evaluated in the first round
    assert first.eval_loss is not None


def test_each_seed_has_its_own_weights_batches_and_held_out_loss() -> None:
    c = config("vit", measure={"warmup_steps": 0, "steps": 2, "repeats": 2, "seeds": 3, "ledger": False})
    c.workload.data["seed"] = c.workload.seed
    assert rounds_of(c.measure) == 3
    assert [round_config(c, i).workload.data["seed"] for i in range(5)] == [3, 4, 5, 3, 4]
    m = run(c)  # at once: seeds make whole runs of it
    assert [r.seed for r in m.runs] == [3, 4, 5]
    assert len({r.eval_loss for r in m.runs}) == len({r.train_loss[0] for r in m.runs}) == 3
    assert (m.eval_loss, m.train_loss) == (m.runs[0].eval_loss, m.runs[0].train_loss)
    assert (m.steps, m.repeats, len(m.step_times_ms)) == (2, 3, 6)
    later = repeat(c, CPU, data_of(c.workload), 4, lambda what: None)
    assert later.seed == 4
    assert later.train_loss == m.runs[1].train_loss
    assert later.eval_loss is None
    assert c.workload.seed == c.workload.data["seed"] == 3  # the config of the trial is not touched
    without = round_config(config("gpt", measure={"seeds": 2}), 1).workload
    assert ("seed" in without.data, without.seed) == (False, 4)


def test_a_measurement_is_made_of_the_repeats_that_came_to_their_end() -> None:
    c = config("gpt", measure={"warmup_steps": 2, "steps": 5, "repeats": 3})
    runs = [
        Run(0, 3, "2025-01-01T00:00:00+00:00", [10.0, 11, 12, 13, 14], {"forward": 4.0}, [2.0, 1.9], eval_loss=1.5),
        Run(1, 3, "2025-01-01T00:01:00+00:00", [20.0, 21, 22, 23, 24], {"forward": 8.0}, [2.0, 1.9]),
        Run(2, 3, "2025-01-01T00:02:00+00:00", error="DeviceOutOfMemory: tried to allocate"),
    ]
    for r, peak_mib in zip(runs, (100.0, 103.0, 500.0)):
        r.peak_allocated_mib, r.peak_reserved_mib = peak_mib, peak_mib + 10
    m = summary(c, runs, None)
    assert (m.repeats, m.step_ms, m.phases_ms, m.eval_loss) == (2, 17.0, {"forward": 6.0}, 1.5)
    assert len(m.runs) == 3  # what went wrong is kept
    assert m.step_ms_ci_low is not None
    assert m.step_ms_ci_high is not None
    assert 8 <= m.step_ms_ci_low <= 11 < 17 < 23 <= m.step_ms_ci_high <= 30
    assert m.evidence == "cpu"
    c.device.type = "cuda"
    on_cuda = summary(c, runs, None)
    assert (on_cuda.peak_allocated_mib, on_cuda.peak_reserved_mib, on_cuda.evidence) == (103.0, 113.0, "measured")
    assert summary(c, runs[::2], None).evidence == "smoke"  # one repeat is left of those that were asked for
    with pytest.raises(ValueError, match="came to its end"):
        summary(c, runs[2:], None)


# -- the clock -------------------------------------------------------------------------------------------------------


def test_a_phase_is_charged_less_what_is_inside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    phases, clock = Phases(), CpuClock()

    def spend(seconds: float) -> None:
        now[0] += seconds

    with phases.listening(clock):
        for _ in range(2):
            clock.start()
            spend(0.5)  # between phases: the step's, no phase's
            with phases(Phase.forward):
                spend(1)
                with phases(Phase.transfer):
                    spend(2)
                spend(4)
            with phases(Phase.backward):
                spend(8)
                with phases(Phase.recompute):
                    spend(16)
                    with phases(Phase.transfer):
                        spend(32)
                    spend(64)
            clock.stop()
            spend(1000)  # not timed
    steps = clock.read()
    assert [ms for ms, _ in steps] == [127_500, 127_500]
    for _, by_phase in steps:
        assert by_phase == {"forward": 5000, "transfer": 34_000, "backward": 8000, "recompute": 80_000}
    assert clock.read() == []


def test_the_clock_survives_a_step_that_breaks_off() -> None:
    phases, clock = Phases(), CpuClock()
    with phases.listening(clock):
        clock.start()
        with pytest.raises(ZeroDivisionError), phases(Phase.forward), phases(Phase.transfer):
            1 / 0  # noqa: B018
        clock.start()
        with phases(Phase.data):
            time.sleep(0.002)
        clock.stop()
    ((step_ms, by_phase),) = clock.read()
    assert list(by_phase) == ["data"]
    assert 2 <= by_phase["data"] <= step_ms


# -- losses ----------------------------------------------------------------------------------------------------------


@cache
def quick(workload: str, strategy: str = "baseline") -> Measurement:
    return run(config(workload, strategy, measure={"steps": 3, "repeats": 1, "ledger": False}))


@pytest.mark.parametrize("strategy", ["checkpoint_selective", "hybrid", "segments_2"])
@pytest.mark.parametrize("workload", ["gpt", "convnet"])
def test_losses_are_those_of_the_baseline_with_dropout_on(workload: str, strategy: str) -> None:
    baseline, other = quick(workload), quick(workload, strategy)
    assert other.train_loss == baseline.train_loss
    assert (other.eval_loss_before, other.eval_loss) == (baseline.eval_loss_before, baseline.eval_loss)
    assert baseline.eval_loss != baseline.eval_loss_before
    assert len(set(baseline.train_loss)) == 4


@pytest.mark.parametrize("workload", ["gpt", "convnet"])
def test_the_held_out_loss_does_not_depend_on_the_micro_batch(workload: str) -> None:
    c = config(workload)
    w = build_workload(c.workload, CPU, data_of(c.workload))
    state, random = {n: t.clone() for n, t in w.model.state_dict().items()}, torch.get_rng_state()
    losses = [evaluate(w, c.measure, size) for size in (1, 3, 5, 8)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert all(torch.equal(t, state[n]) for n, t in w.model.state_dict().items())  # batch statistics, too
    assert torch.equal(torch.get_rng_state(), random)
    assert w.model.training


def test_the_model_trains_again_after_an_evaluation_that_fails() -> None:
    c = config("gpt")
    w = build_workload(c.workload, CPU, data_of(c.workload))

    def full(*_: Any) -> None:
        raise DeviceOutOfMemory("full")

    handle = w.blocks[0].module.register_forward_hook(full)
    with pytest.raises(DeviceOutOfMemory):
        evaluate(w, c.measure, 8)
    handle.remove()
    assert w.model.training


@pytest.mark.parametrize(("steps", "eval_batches", "said"), [
    (4, 0, r"the loss is nan by step \d; lower workload.optimizer.lr"), (1, 2, "on held-out data"),
])  # fmt: skip
def test_a_loss_that_is_not_finite_stops_the_measurement(steps: int, eval_batches: int, said: str) -> None:
    of = {"warmup_steps": steps // 4, "steps": steps, "repeats": 1, "ledger": False, "eval_batches": eval_batches}
    c = config("vit", measure=of)
    c.workload.optimizer.lr = 1e30
    with pytest.raises(NotFinite, match=said):
        run(c)


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_measurement_that_takes_too_long_says_how_far_it_came() -> None:
    with pytest.raises(TimedOut, match=r"measure.timeout_s=1e-09: not done after 1 of \d+ steps"):
        run(config("gpt", measure={"timeout_s": 1e-9}))


def test_offload_that_moves_nothing_is_no_measurement() -> None:
    c = config("gpt", {"offload": {"placement": "all", "min_tensor_kib": 1e6}})
    with pytest.raises(NothingOffloaded):
        run(c)
    c.measure.ledger = False
    with pytest.raises(NothingOffloaded):
        run(c)


def peak_of(strategy: str, capacity_mib: float | None = None, seed: int = 3) -> float:
    c = config("gpt_eager", strategy)
    c.workload.seed = seed
    c.device.capacity_mib = capacity_mib
    return memory_pass(c, CPU, data_of(c.workload)).peak_mib


def test_the_ledgers_peaks_are_in_the_order_that_one_pays_for() -> None:
    names = ("baseline", "micro_batch", "checkpoint_selective", "checkpoint", "offload", "hybrid")
    peaks = {name: peak_of(name) for name in names}
    assert max(peaks, key=peaks.__getitem__) == "baseline"
    assert peaks["checkpoint"] < peaks["checkpoint_selective"]
    assert peaks["hybrid"] <= peaks["checkpoint"]


@pytest.mark.parametrize("strategy", ["baseline", "micro_batch", "hybrid"])
def test_capacity_is_enforced_to_the_block(strategy: str) -> None:
    peak = peak_of(strategy)
    assert peak_of(strategy, capacity_mib=peak) == peak == peak_of(strategy, seed=4)
    with pytest.raises(DeviceOutOfMemory, match="out of memory on the emulated device: tried to allocate"):
        peak_of(strategy, capacity_mib=peak - 512 / 2**20)
    assert peak_of(strategy) == peak  # the next trial starts clean


def test_a_measurement_ends_at_the_capacity() -> None:
    c = config("gpt")
    c.device.capacity_mib = 0.1
    with pytest.raises(DeviceOutOfMemory):
        run(c)


def test_the_ledger_is_off_while_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    ledgers: list[Ledger] = []
    real, real_ledger = strategy_module.run_step, module.Ledger

    def remembered(*args: Any, **kwargs: Any) -> Ledger:
        ledgers.append(real_ledger(*args, **kwargs))
        return ledgers[-1]

    def step(*args: Any, **kwargs: Any) -> Any:
        before = len(ledgers[0].log.order)
        result = real(*args, **kwargs)
        seen.append(len(ledgers[0].log.order) - before)
        return result

    monkeypatch.setattr(module, "Ledger", remembered)
    monkeypatch.setattr(strategy_module, "run_step", step)
    run(config("gpt", measure={"warmup_steps": 1, "steps": 2, "repeats": 1}))
    assert [events > 0 for events in seen] == [True, True, False, False, False]
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_losses_are_read_after_the_timed_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a loss waits for the device, which would be timed."""
    reads: list[str] = []

    class Loud:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

        def item(self) -> float:
            reads.append("read")
            return self.loss.item()

    real = strategy_module.run_step

    def step(*args: Any, **kwargs: Any) -> Any:
        reads.append("step")
        result = real(*args, **kwargs)
        result.loss = Loud(result.loss)
        return result

    monkeypatch.setattr(strategy_module, "run_step", step)
    run(config("gpt", measure={"warmup_steps": 1, "steps": 3, "repeats": 1, "ledger": False}))
    assert reads == ["step", "read", "step", "step", "step", "read", "read", "read"]
