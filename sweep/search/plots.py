"""Pictures of what a search measured, by Optuna's own matplotlib backend: history, trade-off, importance."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from sweep.search.study import Record, open_storage, record

#: Names of the objectives that a trade-off is drawn of.
PEAK, SPEED = "peak_mib", "samples_per_s"
LABELS = {PEAK: "peak memory (MiB)", SPEED: "throughput (samples/s)"}


def draw_study(name: str, storage: str | None, root: Path, folder: Path, *, cap_mib: float | None) -> list[Path]:
    """Draw the study into `folder`; returns the files. What cannot be drawn is a warning; one in memory is not drawn.

    storage, root: as in `open_storage`. cap_mib: the memory cap, drawn into the trade-off.
    """
    if storage is None:
        return []
    try:
        study = optuna.load_study(study_name=name, storage=open_storage(storage, root, Path.cwd()))
        measured = [(t, r) for t in study.get_trials(deepcopy=False) if (r := record(t)).launched and r.values]
    except Exception as error:
        warnings.warn(f"the search was not drawn: {error}", RuntimeWarning, stacklevel=2)
        return []
    several = len(study.directions) > 1
    pictures: dict[str, Callable[[], Any]] = {
        "search_history.png": lambda: _history(study, measured),
        "search_pareto.png": lambda: _pareto(measured, several, cap_mib),
        "search_importances.png": lambda: _importances(study, measured),
    }
    return [path for file, draw in pictures.items() if (path := _draw(draw, folder / file)) is not None]


def _draw(draw: Callable[[], Any], path: Path) -> Path | None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            axes = draw()
            if axes is None:
                return None
            figure = axes.figure if hasattr(axes, "figure") else axes[0].figure
            figure.savefig(path, dpi=120, bbox_inches="tight")
    except Exception as error:
        warnings.warn(f"{path.name} was not drawn: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
        return None
    finally:
        plt.close("all")
    return path


def _history(study: optuna.Study, measured: list[tuple[FrozenTrial, Record]]) -> Any:
    if not measured:
        return None
    speed = len(study.directions) - 1  # throughput is the last objective
    direction = study.directions[speed].name.lower()
    own = _copy([_trial(t, [r.values[speed]], r) for t, r in measured if r.values is not None], [direction])
    return optuna.visualization.matplotlib.plot_optimization_history(own, target_name=LABELS[SPEED])


def _pareto(measured: list[tuple[FrozenTrial, Record]], several: bool, cap_mib: float | None) -> Any:
    points = [(t, r, p) for t, r in measured if (p := _peak_and_speed(r, several)) is not None]
    if not points:
        return None
    own = _copy([_trial(t, list(p), r) for t, r, p in points], ["minimize", "maximize"])
    axes = optuna.visualization.matplotlib.plot_pareto_front(own, target_names=[LABELS[PEAK], LABELS[SPEED]])
    if cap_mib is not None:
        axes.axvline(cap_mib, color="tab:red", linestyle="--", label=f"cap {cap_mib:g} MiB")
        axes.legend()
    return axes


def _importances(study: optuna.Study, measured: list[tuple[FrozenTrial, Record]]) -> Any:
    if len(measured) < 3 or len({tuple(r.values or ()) for _, r in measured}) < 2:
        return None
    speed = len(study.directions) - 1
    own = _copy([_trial(t, [r.values[speed]], r) for t, r in measured if r.values is not None], ["maximize"])
    return optuna.visualization.matplotlib.plot_param_importances(own, target_name=LABELS[SPEED])


def _peak_and_speed(r: Record, several: bool) -> tuple[float, float] | None:
    assert r.values is not None
    if several:
        return (r.values[0], r.values[1]) if len(r.values) == 2 else None
    peak = r.info.get("measured_mib")
    return None if peak is None else (float(peak), r.values[0])


def _trial(trial: FrozenTrial, values: list[float], r: Record) -> FrozenTrial:
    copied = optuna.trial.create_trial(
        state=TrialState.COMPLETE, values=values, params=trial.params, distributions=trial.distributions
    )
    copied.number = trial.number
    for name, value in r.constraints.items():
        copied.set_constraint(name, value)
    return copied


def _copy(trials: list[FrozenTrial], directions: list[Any]) -> optuna.Study:
    study = optuna.create_study(directions=directions, storage=optuna.storages.InMemoryStorage())
    study.add_trials(trials)
    return study
