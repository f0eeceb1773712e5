"""explain=true: the baseline and the preferred trial of each comparison are traced, once everything is decided.

A trace disturbs times, so it comes after all of them. One that fails is a warning: no sweep is lost by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sweep.decide import grouped
from sweep.findings import Trace
from sweep.isolate import run_isolated_trace
from sweep.outcomes import one_line
from sweep.progress import Display
from sweep.results import Comparison, Outcome, TrialResult
from sweep.rounds import in_own_process
from sweep.schema import Config, Mode, typed
from sweep.trial import run_trace

#: Beside result.json, in the trial's folder.
FOLDER = "explain"


def trace_chosen(results: list[TrialResult], display: Display) -> Iterator[TrialResult]:
    """Trace what `chosen` names in each comparison whose config asks for it. Yields each trial with its trace set.

    results: all of a command's trials, whose comparisons are concluded here, before the report does.

    The caller saves them as they come: an interruption leaves those that came to their end.
    """
    asking = [r for r in results if r.config.get("explain") and r.mode == Mode.measure.value]
    if not asking:
        return
    picked = [r for group in grouped(asking) for r in chosen(group.conclude(), group.results)]
    wanted = [r for i, r in enumerate(picked) if not any(r is earlier for earlier in picked[:i])]
    if not wanted:
        return
    display.repeats(len(wanted), "traces")
    names = " and ".join(r.name for r in wanted)
    display.console.print(f"Tracing a few steps of {names}", markup=False, highlight=False)
    for result in wanted:
        with display.trial(f"{result.name}, a few steps under the profiler", "building the workload"):
            try:
                result.trace = _trace(typed(result.config), result, display)
            except Exception as error:
                words = f"Warning: {result.name} could not be traced: {one_line(error)}"
                display.console.print(words, markup=False, highlight=False)
                continue
        yield result


def files_of(result: TrialResult) -> list[Path]:
    """The files of a trial's trace; [] where it has none."""
    return [] if result.trace is None else [Path(result.folder) / name for name in result.trace.files]


def chosen(comparison: Comparison, results: list[TrialResult]) -> list[TrialResult]:
    """The baseline and the preferred trial; where that is the baseline, the one that saves most per time lost.

    results: those that the comparison was made from. Only trials that ran to their end.
    """
    baseline = None if comparison.baseline_index is None else results[comparison.baseline_index]
    preferred = None if comparison.preferred_index is None else results[comparison.preferred_index]
    if preferred is None or preferred is baseline:
        preferred = next((r for r in results if r.name == comparison.cheapest_saving), None)
    picked = [r for r in (baseline, preferred) if r is not None]
    return [r for r in picked if r.outcome == Outcome.ok.value and r.measurement is not None]


def _trace(config: Config, result: TrialResult, display: Display) -> Trace:
    run = run_isolated_trace if in_own_process(config) else run_trace
    trace = run(config, result.name, Path(result.folder) / FOLDER, progress=display.step)
    trace.files = [f"{FOLDER}/{name}" for name in trace.files]
    return trace
