"""What all tests share: one thread, the same random state at the start of each, and nothing kept from another."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_reference_of_another_test() -> None:
    """Verification keeps what the baseline computed; a test that breaks the step must not meet another's."""
    from sweep.verify import _references

    _references.clear()
