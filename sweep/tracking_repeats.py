"""A trial's run in MLflow once its repeats were made: its numbers over all of them, and each repeat's own."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from sweep.interrupts import whole
from sweep.results import Measurement, TrialResult, write_json
from sweep.tracking_runs import best_effort, write_files, write_result_tags
from sweep.tracking_store import Store
from sweep.tracking_values import MetricValue, metrics_of, result_tags_of
from sweep.words import known


@whole()
def update_measurement(store: Store, run_id: str | None, result: TrialResult, before: TrialResult) -> None:
    """Log what the repeats changed, and replace result.json. The run's state is left as it is.

    before: the result as it was logged, after its first repeat. Single values are logged at step 0 again, where MLflow
    takes the later one; curves go on where they ended.
    """
    if run_id is None:
        return
    with best_effort(f"the repeats of {result.name}"):
        logged = set(metrics_of(before))
        new = [value for value in metrics_of(result) if value not in logged]
        write_result_tags(store, run_id, result_tags_of(result), [*new, *repeat_metrics_of(result.measurement)])
    with best_effort(f"the result of {result.name}"), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        write_json(result, path)
        write_files(store, run_id, [path])


def repeat_metrics_of(measurement: Measurement | None) -> list[MetricValue]:
    """Each repeat's median step time, held-out loss and peaks, at the step that is its round."""
    found: list[tuple[str, float | None, int]] = []
    for run in measurement.runs if measurement is not None else ():
        if not run.error and run.step_times_ms:
            found += [
                ("repeat/step_ms", statistics.median(run.step_times_ms), run.index),
                ("repeat/eval_loss", run.eval_loss, run.index),
                ("repeat/peak_allocated_mib", run.peak_allocated_mib, run.index),
                ("repeat/peak_reserved_mib", run.peak_reserved_mib, run.index),
            ]
    return [(name, value, step) for name, value, step in found if known(value) is not None and value is not None]
