"""The random generators that a model may draw from: torch's, Python's and numpy's global one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

#: numpy takes seeds below this.
_NUMPY_SEEDS = 2**32


def seed_everything(seed: int) -> None:
    """Seed torch's generators (of every device), Python's and numpy's global one."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)


def python_states() -> tuple[Any, Any]:
    """The states of Python's and of numpy's generator, for `restore`."""
    return random.getstate(), np.random.get_state()


def restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def random_states(device: torch.device) -> dict[str, bytes]:
    """The state of each generator that code on `device` may draw from, by its name, as bytes to compare."""
    python, numpy = python_states()
    found = {"torch": torch.get_rng_state().numpy().tobytes(), "python": repr(python).encode()}
    found["numpy"] = repr((numpy[1].tobytes(), *numpy[2:])).encode()
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return found
