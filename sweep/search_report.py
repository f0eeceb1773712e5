"""What a search says while it runs: a line per trial with the best so far, and the result at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sweep.search_record import BY_MEMORY, Record, best_first, counts, least_violating, number_text


class Progress:
    """Lines for a terminal or a log. `say` prints one."""

    def __init__(
        self, directions: Sequence[str], objectives: Sequence[str], limit: int | None, say: Callable[[str], None]
    ) -> None:
        self.directions, self.objectives, self.limit, self.say = directions, objectives, limit, say

    def begin(self, study: str, found: Sequence[Record]) -> None:
        if found:
            n = counts(found)["launched"]
            self.say(f"going on with the study {study}: {n} trials are known")
        else:
            self.say(f"study {study}")

    def ended(self, r: Record, found: Sequence[Record]) -> None:
        launched = counts(found)["launched"]
        of = f"{launched}/{self.limit}" if self.limit is not None else str(launched)
        if r.answered_by == BY_MEMORY:
            return  # nothing new is known
        said = [f"[{of}] trial {r.number}: {self.result(r)}"]
        if r.overrides:
            said.append(words(r))
        said.append(self.best_so_far(found))
        self.say(" | ".join(said))

    def result(self, r: Record) -> str:
        """The outcome with its numbers, an estimate named as one."""
        shown = r.outcome
        if r.values is not None:
            shown += " " + self.numbers(r.values)
        elif r.estimated_values is not None:
            why = "no result" if r.launched else "not run"
            shown += f" ({why}; estimated {self.numbers(r.estimated_values)})"
        over = [f"{k} by {number_text(v)}" for k, v in r.constraints.items() if v > 0]
        if over:
            shown += f", over {' and '.join(over)}"
        if r.state == "FAIL" and r.reason:
            shown += f" ({r.reason})"
        return shown

    def numbers(self, values: Sequence[float]) -> str:
        return " ".join(f"{n}={number_text(v)}" for n, v in zip(self.objectives, values))

    def best_so_far(self, found: Sequence[Record]) -> str:
        best = best_first(found, self.directions)
        if not best:
            return "no feasible trial yet"
        if len(self.directions) > 1:
            return f"front: {len(best)} trials"
        assert best[0].values is not None
        return f"best {self.numbers(best[0].values)} (trial {best[0].number})"

    def end(self, found: Sequence[Record], why: str) -> bool:
        """Say the result. Returns whether there is a feasible trial."""
        n = counts(found)
        tail = ", ".join(f"{n[k]} {w}" for k, w in _SAID.items() if n[k])
        self.say(f"the search ended: {why} ({tail})" if tail else f"the search ended: {why}")
        best = best_first(found, self.directions)
        if not best:
            self.say("no feasible trial")
            nearest = least_violating(found)
            if nearest is not None:
                self.say(f"least violating: trial {nearest.number}: {self.result(nearest)} | {_where(nearest)}")
            return False
        if len(self.directions) == 1:
            self.say(f"best: trial {best[0].number}: {self.result(best[0])} | {_where(best[0])}")
        else:
            self.say(f"Pareto front of {len(best)} trials:")
            for r in best:
                self.say(f"  trial {r.number}: {self.result(r)} | {_where(r)}")
        return True


_SAID = {
    "launched": "run in all",
    "infeasible": "of them infeasible",
    "failed": "failed",
    "not_run": "were refused before a run",
    "answered_from_memory": "were known already",
}


def words(r: Record) -> str:
    """The words of a job that were searched; the fixed ones are the same for all."""
    searched = {key.lstrip("+~") for key in r.params}
    return " ".join(o for o in r.overrides if o.partition("=")[0].lstrip("+~") in searched)


def _where(r: Record) -> str:
    return " | ".join(x for x in (words(r), r.folder or "") if x)
