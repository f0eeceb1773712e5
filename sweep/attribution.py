"""Why a candidate's peak and step time differ from the baseline's, from stored results; see sweep.findings.

Nothing is run and nothing is assumed beyond what the results hold: the ledger's account of each peak, the median times
of the phases, and traces where there are some.
"""

from __future__ import annotations

from sweep.attribution_comparison import explain_comparison
from sweep.attribution_peak import account_of, peak_change, peak_findings, peak_words
from sweep.attribution_time import predicted_words, time_change, time_findings, time_words
from sweep.attribution_words import moment
from sweep.checks import STRENGTH
from sweep.findings import Explanation
from sweep.results import TrialResult

__all__ = ["explain_comparison", "explain_pair"]

NOT_KNOWN = "not known"


def explain_pair(baseline: TrialResult, candidate: TrialResult) -> Explanation:
    """Why `candidate`'s peak (MiB) and step time (ms) differ from `baseline`'s, measured or predicted alike.

    `peak` is None where the ledger saw one of the two not, or where one is measured and the other predicted; `time`
    where one of them was not timed. `findings` says so then.
    """
    weakest = min((baseline, candidate), key=lambda r: STRENGTH.get(r.evidence, 0))
    before, after = account_of(baseline), account_of(candidate)
    found = Explanation(
        baseline=baseline.name,
        candidate=candidate.name,
        evidence=weakest.evidence,
        moment_before=NOT_KNOWN if before is None else moment(before.peak),
        moment_after=NOT_KNOWN if after is None else moment(after.peak),
    )
    alike = (baseline.measurement is None) == (candidate.measurement is None)
    if before is None or after is None:
        of = " and ".join(r.name for r, a in ((baseline, before), (candidate, after)) if a is None)
        found.findings.append(
            f"what was alive at the peak of {of} is not known: {_why_no_account(baseline, candidate)}"
        )
    elif not alike:
        found.findings.append("one of the two was measured and the other only predicted: their peaks are not compared")
    else:
        found.peak = peak_change(before, after)
        found.words += peak_words(candidate.name, found.evidence, before, after, found.peak)
        found.findings += peak_findings(before, after, found.peak) + _prediction_findings(candidate)
    found.time = time_change(baseline, candidate)
    if found.time is not None:
        found.words += time_words(baseline, candidate, found.time)
        found.findings += time_findings(baseline, candidate, found.time)
    else:
        found.words += predicted_words(candidate)
    return found


def _why_no_account(*results: TrialResult) -> str:
    if all(r.measurement is None and r.prediction is None for r in results):
        return "neither was measured or predicted"
    if any(r.config.get("measure", {}).get("ledger") is False and r.measurement is not None for r in results):
        return "measure.ledger=false"
    return "it was not recorded"


def _prediction_findings(result: TrialResult) -> list[str]:
    """Where the ledger found the peak of a measured trial at another place than its prediction did."""
    m, p = result.measurement, result.prediction
    if m is None or m.peak is None or p is None or p.peak is None or m.peak.phase == p.peak.phase:
        return []
    return [f"the peak of {result.name} was predicted in {moment(p.peak)} and found in {moment(m.peak)}"]
