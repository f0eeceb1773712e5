"""What may be set under `hydra.sweeper` with `hydra/sweeper=budget`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from hydra.core.config_store import ConfigStore

# OmegaConf reads the annotations at run time, hence Optional.


@dataclass
class BudgetSweeperConf:
    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"sampler": "tpe"}])
    _target_: str = "hydra_plugins.budget_sweeper.budget_sweeper.BudgetSweeper"
    _recursive_: bool = False  # samplers and hooks are made when a sweep really starts

    # What is searched and in which direction
    params: dict[str, Any] = field(default_factory=dict)  # key -> the words of a command line, such as "choice(1,2)"
    custom_search_space: Optional[str] = None  # import path of f(config, trial), which suggests further keys
    direction: Any = "minimize"  # minimize | maximize, or a list of them for several objectives
    objectives: list[str] = field(default_factory=list)  # names of the objectives, in the order of `direction`
    constraints: list[str] = field(default_factory=list)  # names that every trial has; those returned are added

    # How it is searched
    sampler: Any = None  # `_target_` of an Optuna sampler; see the group hydra/sweeper/sampler
    seed: Optional[int] = None  # of the sampler, where its own `seed` is null
    enqueue: list[Any] = field(default_factory=list)  # points to try first: [{key: value, ...}, ...]
    plan: Any = None  # `_target_`: called with the search before the first trial, returns more such points
    preflight: Any = None  # `_target_`: called with a job before it is launched; may answer in its place
    read: Any = None  # `_target_`: called with a job and what it returned, returns the answer for the sampler
    recover: Any = None  # `_target_`: called with a job whose command was killed, returns what it came to, or None
    verdict: Any = None  # `_target_`: called with the search at its end, returns the Record of its best trial, or None

    # How long
    n_trials: Optional[int] = None  # jobs launched, over all runs of the study; null: 20, or all points of a grid
    timeout_s: Optional[float] = None  # seconds; after that no new job is launched
    n_jobs: int = 1  # jobs at a time, with a launcher that runs several
    max_failures: Optional[int] = 10  # more failed jobs than this in one run end it; null: no limit
    max_failure_rate: Optional[float] = None  # likewise, the share of failed jobs in one batch
    max_skipped: int = 200  # so many candidates in a row that need no run end the search

    # Where it is kept
    storage: Any = "auto"  # auto: mlruns/optuna.db beside the app; null: in memory; a URL; or `_target_`
    study_name: Optional[str] = None  # null: made from the app and all that is fixed
    irrelevant: list[str] = field(default_factory=list)  # keys that change no result, so no study is told by them
    resume: bool = True  # go on with a study of the same name; false: begin a new one beside it


ConfigStore.instance().store(
    group="hydra/sweeper", name="budget_sweeper", node=BudgetSweeperConf, provider="budget_sweeper"
)
