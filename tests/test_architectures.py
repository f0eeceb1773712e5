"""Every strategy of conf/strategy/ on public architectures: what is predicted, computed and treated is right."""

from __future__ import annotations

import pytest

from benchmarks.architectures import STRATEGIES, examined, markdown, wrong_with, wrong_with_blocks
from benchmarks.architectures_zoo import ZOO

pytest.importorskip("transformers")


def _cases(*subjects: str) -> list[object]:
    """Architecture by subject; what is not right yet is marked, and may not come right unnoticed."""
    cases = []
    for name, architecture in ZOO.items():
        for subject in subjects:
            marks = [] if architecture.quick else [pytest.mark.slow]
            if gap := architecture.gaps.get(subject):
                marks.append(pytest.mark.xfail(reason=gap, strict=True))
            cases.append(pytest.param(name, subject, marks=marks, id=f"{name}-{subject}"))
    return cases


@pytest.mark.parametrize(("name", "strategy"), _cases(*STRATEGIES))
def test_is_predicted_and_computes_the_same_or_says_why_not(name: str, strategy: str) -> None:
    assert wrong_with(examined(name).pairs[strategy], ZOO[name]) == ""


@pytest.mark.parametrize(("name", "_"), _cases("blocks"))
def test_the_blocks_hold_the_larger_part_of_the_activations(name: str, _: str) -> None:
    assert wrong_with_blocks(examined(name), ZOO[name]) == ""


def test_the_table_shows_every_pair() -> None:
    name = next(n for n, a in ZOO.items() if a.quick)
    table = markdown([examined(name)])
    row = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
    assert row.count("|") == 4 + len(STRATEGIES)
    assert f"{len(STRATEGIES)} pairs:" in table
