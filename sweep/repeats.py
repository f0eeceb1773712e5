"""The repeats of a command's trials, in turn over the trials of each comparison (A B C A B C), and the baseline's last.

A trial makes the first of its repeats itself. The others are made here once all trials have been through that, each a
whole run and, where trials are, in a fresh process: what slows the machine for a while then slows all trials alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sweep.config.check import typed
from sweep.config.schema import Config, Isolate, Mode
from sweep.decide.verdict import by_comparison
from sweep.format import count
from sweep.progress import Display
from sweep.results import Measurement, Outcome, Run, TrialResult
from sweep.tracking import Store
from sweep.tracking.runs import update_measurement
from sweep.trial.measure import Seen, rounds_of, summary
from sweep.trial.process import run_isolated_repeat
from sweep.trial.trial import compare_prediction, run_repeat, save


def in_own_process(config: Config) -> bool:
    """Whether a trial of `config` and each of its repeats gets a fresh process."""
    if config.measure.isolate is Isolate.auto:
        return config.device.type == "cuda" and config.mode is Mode.measure
    return config.measure.isolate is Isolate.always


def repeat_in_turn(results: Sequence[TrialResult], display: Display, store: Store | None) -> None:
    """Make the repeats that the trials' configs ask for and that are not there yet; `results` are changed and saved.

    A trial whose repeat goes wrong keeps what it has and is not repeated any more. An interruption leaves every
    repeat that came to its end, saved.
    """
    groups = [_Repeating(group) for group in by_comparison(list(results))]
    todo = sum(len(list(group.planned())) for group in groups)
    if not todo:
        return
    display.repeats(todo)
    display.console.print(_announcement(groups, todo), markup=False, highlight=False)
    try:
        for group in groups:
            for trial, index, at_end in group.planned():
                if not trial.failed:
                    words = "the baseline at the end" if at_end else f"repeat {index + 1} of {trial.rounds}"
                    with display.trial(f"{trial.result.name}, {words}", "building the workload"):
                        trial.repeat(index, at_end, display)
                else:
                    display.skip()
    finally:
        for group in groups:
            for trial in group.trials:
                if store is not None and trial.repeated:
                    update_measurement(store, trial.result.mlflow_run_id, trial.result, trial.before)


class _Trial:
    """A trial that is being repeated."""

    def __init__(self, result: TrialResult, measurement: Measurement) -> None:
        self.result, self.measurement = result, measurement
        self.before = replace(result)
        self.config = typed(result.config)
        self.rounds = rounds_of(self.config.measure)
        self.repeated = self.failed = False

    def missing(self) -> list[int]:
        """Rounds that are still to be made. None where all were made at once."""
        m = self.config.measure
        if self.result.mode != Mode.measure.value or not m.interleave or self.measurement.repeats >= self.rounds:
            return []
        made = {run.index for run in self.measurement.runs}
        return [index for index in range(1, self.rounds) if index not in made]

    def repeat(self, index: int, at_end: bool, display: Display) -> None:
        """Make one round, and the measurement anew from all of them."""
        started = time.perf_counter()
        if in_own_process(self.config):
            folder = Path(self.result.folder) / f"repeat_{index + 1}"
            run = run_isolated_repeat(self.config, index, folder, progress=display.step)
        else:
            run = run_repeat(self.config, index, progress=display.step)
        run.at_end = at_end
        self.failed, self.repeated = bool(run.error), True
        self._add(run)
        self.result.wall_s += time.perf_counter() - started
        save(self.result, Path(self.result.folder))
        if run.error:
            words = f"{self.result.name}: repeat {index + 1} went wrong: {run.error}"
            display.console.print(words, markup=False, highlight=False)

    def _add(self, run: Run) -> None:
        result = self.result
        self.measurement = summary(self.config, [*self.measurement.runs, run], Seen.of(self.measurement))
        result.measurement, result.evidence = self.measurement, self.measurement.evidence
        if result.prediction is not None:
            result.prediction = replace(result.prediction)  # `before` keeps its own
            compare_prediction(result.prediction, self.measurement.peak_allocated_mib)


class _Repeating:
    """The trials of one comparison that came to their end."""

    def __init__(self, group: list[TrialResult]) -> None:
        ended = [(r, r.measurement) for r in group if r.outcome == Outcome.ok.value]
        self.trials = [_Trial(result, m) for result, m in ended if m is not None]

    def planned(self) -> Iterator[tuple[_Trial, int, bool]]:
        """Who is repeated as which round, in order, and whether that is the baseline's last."""
        missing = {id(trial): trial.missing() for trial in self.trials}
        for index in sorted({index for rounds in missing.values() for index in rounds}):
            yield from ((trial, index, False) for trial in self.trials if index in missing[id(trial)])
        last = next((t for t in self.trials if t.result.is_baseline and missing[id(t)]), None)
        # A single round is a first look, which no drift makes more certain.
        if last is not None and last.config.measure.drift and any(not t.result.is_baseline for t in self.trials):
            yield last, last.rounds, True


def _announcement(groups: list[_Repeating], todo: int) -> str:
    trials = sum(any(t is trial for t, _, _ in group.planned()) for group in groups for trial in group.trials)
    ends = sum(at_end for group in groups for _, _, at_end in group.planned())
    words = f"Repeating {count(trials, 'trial')} in turn: {count(todo, 'more run')}"
    return words + (", the last of them the baseline's" if ends == 1 else "")
