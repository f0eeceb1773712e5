"""One trial from its config to its result; trial.py shows the whole way."""

from sweep.trial.trial import run_trial

__all__ = ["run_trial"]
