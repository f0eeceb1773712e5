"""When a search is over."""

from __future__ import annotations

import time

from sweep.errors import BadInput
from sweep.search_job import Settings
from sweep.search_record import BY_MEMORY, Record

DEFAULT_TRIALS = 20


class Limits:
    """Counts what has ended since this run began."""

    def __init__(self, settings: Settings, *, exhaustive: bool) -> None:
        self.settings = settings
        #: Jobs to launch over all runs of the study; None: as many as there are points.
        self.n_trials = settings.n_trials
        if self.n_trials is None and not exhaustive:
            self.n_trials = DEFAULT_TRIALS
        self.skipped_in_a_row = self.repeats_in_a_row = self.failures = 0
        self.batch_failure_rate = 0.0
        self.stopped_by_sampler = False
        self._last_failure = ""
        self._started = time.monotonic()

    def count(self, r: Record) -> None:
        self.skipped_in_a_row = 0 if r.launched else self.skipped_in_a_row + 1
        self.repeats_in_a_row = self.repeats_in_a_row + 1 if r.answered_by == BY_MEMORY else 0
        if r.state == "FAIL" and r.launched:
            self.failures += 1
            self._last_failure = r.reason

    def room(self, launched: int) -> int:
        """How many jobs the next batch may hold."""
        return self.settings.n_jobs if self.n_trials is None else min(self.settings.n_jobs, self.n_trials - launched)

    def why_end(self, launched: int) -> str | None:
        """Why the search is over, or None."""
        s = self.settings
        if self.n_trials is not None and launched >= self.n_trials:
            return f"{self.n_trials} trials were run"
        if self.stopped_by_sampler:
            return "the sampler has no further candidate"
        if s.timeout_s is not None and time.monotonic() - self._started >= s.timeout_s:
            return f"the time of {s.timeout_s:g} s is over"
        if self._failed_too_often():
            return "too many jobs failed"
        if self.skipped_in_a_row >= s.max_skipped:
            return f"the last {s.max_skipped} candidates needed no run"
        return None

    def _failed_too_often(self) -> str | None:
        s = self.settings
        if s.max_failures is not None and self.failures > s.max_failures:
            return "max_failures"
        if s.max_failure_rate is not None and self.batch_failure_rate > s.max_failure_rate:
            return "max_failure_rate"
        return None

    def check_failures(self) -> None:
        """Raise BadInput if more jobs failed than allowed."""
        key = self._failed_too_often()
        if key is not None:
            raise BadInput(
                f"hydra.sweeper.{key}",
                getattr(self.settings, key),
                f"{self.failures} jobs failed, the last with {self._last_failure}",
                "mend the job, or raise the limit",
            )
