"""Fields, ranges, device profiles, and the one name of a strategy."""

from sweep.config.check import typed
from sweep.config.schema import Config

__all__ = ["Config", "typed"]
