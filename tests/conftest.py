"""What all tests share: one thread, and the same random state at the start of each."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    torch.manual_seed(0)
