"""Single-machine training memory strategies: predicted, verified, measured and judged against a budget.

In one's own training loop: `apply` puts a strategy on a model, `micro_batches` divides a batch with its weights.
For a model that is there: `predict` and `compare`. The command line has all of it (train.py, memory-sweep).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sweep.api import Compared, compare, from_training_arguments, predict
    from sweep.strategy.apply import InForce, apply, micro_batches

__version__ = "0.1.0"
__all__ = [
    "Compared",
    "InForce",
    "__version__",
    "apply",
    "compare",
    "from_training_arguments",
    "micro_batches",
    "predict",
]

# Before torch loads OpenMP: threads that wait for each other give up their core soon instead of spinning. Alone on a
# machine this changes nothing; beside two busy processes on two cores, the slowest of ten steps took 1.7 s, not 10.9 s.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    """Names are loaded when they are used: `import sweep` itself takes no torch."""
    if name in __all__:
        module = "sweep.strategy.apply" if name in ("InForce", "apply", "micro_batches") else "sweep.api"
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
