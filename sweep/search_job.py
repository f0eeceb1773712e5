"""What a search hands around: a candidate, whoever runs it, and the limits that a person sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from sweep.search_answer import Answer
from sweep.search_space import Point


@dataclass
class Job:
    """One candidate: what a preflight judges and what a runner launches."""

    number: int  # of the Optuna trial; also names the folder
    point: Point
    overrides: list[str]
    config: DictConfig  # composed, without Hydra's own part
    folder: Path | None = None
    estimate: Answer | None = None  # what the preflight said


class Runner(Protocol):
    """Composes and launches jobs."""

    def compose(self, number: int, overrides: list[str]) -> tuple[DictConfig, Path | None]:
        """The config and the folder that the job would have. Raises what composing raises."""

    def launch(self, jobs: Sequence[Job]) -> list[tuple[Any, Path | None]]:
        """Run the jobs; for each what it returned, or its exception, and its folder."""


@dataclass
class Settings:
    """How long to search and what to make of failures. See the plugin's config for the meaning of each."""

    directions: list[str] = field(default_factory=lambda: ["minimize"])
    objectives: list[str] = field(default_factory=list)  # names; empty: value, or value_0, value_1, ...
    constraints: list[str] = field(default_factory=list)  # names that every trial must have
    n_trials: int | None = None
    timeout_s: float | None = None
    n_jobs: int = 1
    max_failures: int | None = 10
    max_failure_rate: float | None = None
    max_skipped: int = 200
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.objectives:
            several = len(self.directions) > 1
            self.objectives = [f"value_{i}" for i in range(len(self.directions))] if several else ["value"]
