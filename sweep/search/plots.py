"""Pictures of what a search measured, by Optuna's own backend: history and importance of the keys for the throughput.

Its trade-off is the report's pareto.png.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from sweep.search.study import record

SPEED = "throughput (samples/s)"


def draw_study(study: optuna.Study, folder: Path) -> list[Path]:
    """Draw into `folder`; returns the files. What cannot be drawn is left out with a warning."""
    measured = [(t, r) for t in study.get_trials(deepcopy=False) if (r := record(t)).launched and r.values]
    # A copy of what ran: the estimates of what was refused are no measurements. Throughput is the last objective.
    own = optuna.create_study(direction=study.directions[-1])
    for trial, r in measured:
        assert r.values is not None
        own.add_trial(
            optuna.trial.create_trial(
                state=TrialState.COMPLETE, value=r.values[-1], params=trial.params, distributions=trial.distributions
            )
        )
    plots: dict[str, Any] = {"search_history.png": optuna.visualization.matplotlib.plot_optimization_history}
    if len(measured) > 2 and len({r.values[-1] for _, r in measured if r.values}) > 1:
        plots["search_importances.png"] = optuna.visualization.matplotlib.plot_param_importances
    drawn = []
    for name, plot in plots.items() if measured else ():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna's plots are marked experimental
            try:
                plot(own, target_name=SPEED).figure.savefig(folder / name, dpi=120, bbox_inches="tight")
                drawn.append(folder / name)
            except Exception as error:
                warnings.simplefilter("default")
                warnings.warn(f"{name} was not drawn: {error}", RuntimeWarning, stacklevel=2)
    return drawn
