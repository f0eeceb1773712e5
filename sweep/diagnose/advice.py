"""A diagnosis before any strategy: what fills the memory, how low it can get, what each direction could save, and from
it the order in which to try: which direction applies, why, and what to type.

`Facts` come from predictions (sweep.diagnose.predict), are plain data and in MiB. Decided by memory alone, since
nothing was run: whether there is compute, link or host memory to spare is told by FLOPs, bytes and bandwidths, and is
theoretical. All of it is codes and numbers; sweep.report.phrases words them.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field

from sweep.decide.reasons import lasting_mib
from sweep.environment import program
from sweep.results import Evidence, Finding, Phase, Prediction, WhatIf, lies_in_activations, spent_mib

# -- what was found -------------------------------------------------------------------------------------------------

#: Peaks that differ by no more than this share are alike.
ALIKE = 1e-3
#: A saving counts from this share of the baseline's peak on.
COUNTS = 0.01

#: Directions, those that change least first.
MICRO, SELECTIVE, CHECKPOINT, OFFLOAD = "micro_batch", "checkpoint_selective", "checkpoint", "offload"
HYBRID, MICRO_CHECKPOINT, ALL = "hybrid", "micro_batch+checkpoint", "micro_batch+hybrid"
DIRECTIONS = (MICRO, SELECTIVE, CHECKPOINT, OFFLOAD, HYBRID, MICRO_CHECKPOINT, ALL)
#: Those that are more than one strategy at once.
TOGETHER = (HYBRID, MICRO_CHECKPOINT, ALL)


@dataclass
class Limits:
    """What a peak may take. A budget caps what is allocated; a device must hold what its allocator reserves."""

    budget_mib: float | None = None  # budget.memory_mib
    device_mib: float | None = None  # device.capacity_mib less what driver and context take
    capacity_mib: float | None = None
    context_mib: float = 0.0
    reserves: bool = True  # False: a CPU, where no allocator lies between what is allocated and the device

    @property
    def known(self) -> bool:
        return self.budget_mib is not None or self.device_mib is not None

    def room_mib(self, allocated_mib: float, reserved_mib: float) -> float | None:
        """What is left of the tighter limit; negative: short by so much. None: no limit is known."""
        rooms = [] if self.budget_mib is None else [self.budget_mib - allocated_mib]
        return min(rooms if self.device_mib is None else [*rooms, self.device_mib - reserved_mib], default=None)


@dataclass
class Setting:
    """One strategy as predicted, or why it does not apply."""

    direction: str
    overrides: list[str]  # as typed: strategy=checkpoint strategy.checkpoint.every_k=2
    name: str = ""  # see sweep.config.strategy_names
    refused: Finding | None = None  # it does not apply, and nothing below is known
    allocated_mib: float = 0.0
    reserved_mib: float = 0.0
    saved_mib: float = 0.0  # against the baseline's allocated peak
    peak_phase: str = ""
    fits: bool = True  # all limits that are known
    room_mib: float | None = None
    micro_batch_size: int = 1
    accumulation_steps: int = 1
    recompute_flops_ratio: float = 0.0  # recomputed FLOPs over those of a step without
    moved_mib: float = 0.0  # to the host and back, per optimizer step
    transfer_ms: float | None = None  # theoretical, at the link's bandwidth, both ways; None: not known
    host_mib: float = 0.0  # highest sum of host copies


@dataclass
class Facts:
    """Everything that is decided from."""

    baseline: Prediction
    limits: Limits
    #: At the highest point of the optimizer's step, by category: all of it stays, whatever the strategy.
    floor: dict[str, float]
    extremes: list[Setting] = field(default_factory=list)  # the most that each direction could save
    mildest: list[Setting] = field(default_factory=list)  # in a direction, the setting that changes least and fits
    what_if: list[WhatIf] = field(default_factory=list)  # for the baseline
    what_if_lowest: list[WhatIf] = field(default_factory=list)  # for the lowest of the extremes
    gates: dict[str, float] = field(default_factory=dict)  # what the budget asks beside memory, by its key
    global_batch_size: int = 1
    blocks: int = 0
    here: bool = True  # whether this machine has the device
    host_free_mib: float | None = None  # memory of the host that has the device; None: not known
    compute_ms: float | None = None  # theoretical: FLOPs of the baseline's step at the device's peak rate

    @property
    def known(self) -> list[Setting]:
        """The extremes that apply."""
        return [s for s in self.extremes if s.refused is None]

    def extreme(self, direction: str) -> Setting | None:
        return next((s for s in self.known if s.direction == direction), None)

    def mild(self, direction: str) -> Setting | None:
        return next((s for s in self.mildest if s.direction == direction), None)

    def host_holds(self, setting: Setting) -> bool:
        """Whether the host copies of a setting fit. True where the host's memory is not known."""
        return self.host_free_mib is None or setting.host_mib <= self.host_free_mib

    @property
    def peak_mib(self) -> float:
        return self.baseline.allocated_mib

    @property
    def floor_mib(self) -> float:
        return sum(self.floor.values())

    @property
    def floor_room_mib(self) -> float | None:
        """The reserved memory is taken to be no more than the floor."""
        return self.limits.room_mib(self.floor_mib, self.floor_mib)

    @property
    def room_mib(self) -> float | None:
        """Of the baseline; negative: short by so much."""
        return self.limits.room_mib(self.baseline.allocated_mib, self.baseline.reserved_mib)

    @property
    def fits(self) -> bool | None:
        """Whether the baseline does. None: no limit is known."""
        return None if self.room_mib is None else self.room_mib >= 0 and self.baseline.fits

    @property
    def lowest(self) -> Setting | None:
        """The extreme with the lowest peak; of those within a per mille of it, the one that changes least."""
        least = min((s.allocated_mib for s in self.known), default=0.0)
        return next((s for s in self.known if s.allocated_mib <= (1 + ALIKE) * least), None)


@dataclass
class Row:
    """One row of the order in which to try. When it is meant, what to watch and not to conclude follows from `row`."""

    row: str  # keep | micro_batch | checkpoint | offload | hybrid | one_at_a_time | other
    applies: bool
    because: list[Finding]  # why it applies or does not
    overrides: list[str] = field(default_factory=list)  # to type behind the diagnosis' own words
    setting: Setting | None = None  # what that command is predicted to take
    cost: float | None = None  # theoretical time that it adds, as a share of the step's; None: not known


@dataclass
class Diagnosis:
    """The answer, and what it was made from."""

    answer: str  # yes | no | in part | not known
    because: Finding | None = None
    facts: Facts | None = None  # None: the baseline cannot be predicted
    order: list[Row] = field(default_factory=list)  # those that apply first, in the order in which to try
    feasible: bool = False  # something fits under the limits, or no limit is known
    workload: str = ""
    device: str = ""
    evidence: str = Evidence.predicted.value
    error: str = ""  # why the baseline cannot be predicted
    overrides: list[str] = field(default_factory=list)  # of the command line
    started_at: str = ""  # ISO 8601, UTC
    seconds: float = 0.0
    folder: str = ""
    mlflow_run_id: str | None = None

    @property
    def command(self) -> str:
        """Repeats it."""
        return shlex.join([*program(), *self.overrides])

    @property
    def first(self) -> Row | None:
        """The first row that applies."""
        return next((a for a in self.order if a.applies), None)


# -- what follows from it ---------------------------------------------------------------------------------------------

KEEP, ONE_AT_A_TIME, OTHER = "keep", "one_at_a_time", "other"
#: From this share of the peak on, activations and temporaries are called what fills the memory, if as much of it lies
#: above the floor.
MOSTLY = 0.5
#: Largest error of a predicted reserved size so far, rounded (benchmarks/results/published.md).
CLOSE = 0.05
#: From here on a gate leaves so little that only one change at a time can be told from it.
STRICT_THROUGHPUT, STRICT_LOSS = 0.9, 1.02
#: Changes that cost nothing but rounding; tried before those that save more and cost more.
FREE = ("fused", "sdpa", "expandable_segments")


def answer(facts: Facts) -> tuple[str, Finding]:
    """`yes`, `no` or `in part`: whether the activations are what fills the memory."""
    peak = facts.baseline.peak
    assert peak is not None, "a prediction always has one"
    above = 1 - facts.floor_mib / facts.peak_mib
    if not lies_in_activations(peak):
        kind, code = "no", "peak_in_optimizer" if peak.phase == Phase.optimizer.value else "peak_in_lasting"
    elif spent_mib(peak) >= MOSTLY * peak.mib and above >= MOSTLY:
        kind, code = "yes", "activations"
    else:
        kind, code = "in part", "lasting_too" if spent_mib(peak) / peak.mib <= above else "floor_nearly_as_high"
    most = max(0.0, facts.peak_mib - facts.floor_mib)
    sizes = {"peak_mib": facts.peak_mib, "floor_mib": facts.floor_mib, "most_mib": most}
    shares = {f"{category}_ratio": size / peak.mib for category, size in peak.at_peak_mib.items()}
    ratios = {"most_ratio": most / facts.peak_mib, "lasting_ratio": lasting_mib(peak) / peak.mib}
    return kind, Finding(code, sizes | ratios | shares)


def fit(facts: Facts) -> list[Finding]:
    """Whether the baseline fits the limits, what they are, and how sure that is."""
    b, limits, room = facts.baseline, facts.limits, facts.room_mib
    if room is None:
        half = b.allocated_mib / 2
        digits = 10 ** max(0, len(str(int(half))) - 2)  # two that matter: a size to type
        return [Finding("no_limit", {"try": max(digits, int(half) // digits * digits)})]
    device = limits.device_mib
    sizes = {"room_mib": room, "budget": limits.budget_mib, "device_mib": device, "context_mib": limits.context_mib}
    found = [Finding("does_fit" if facts.fits else "does_not_fit", {k: v for k, v in sizes.items() if v})]
    if room >= 0 and not b.fits:
        found.append(Finding("yet_in_pieces"))
    if limits.reserves and device is not None and abs(device - b.reserved_mib) < CLOSE * device:
        found.append(Finding("close", {"off_ratio": CLOSE}))
    return found


def feasible(facts: Facts) -> bool:
    """Whether anything fits: the baseline or a setting. True where no limit is known."""
    return facts.fits is not False or any(s.fits and facts.host_holds(s) for s in [*facts.known, *facts.mildest])


# -- the order -------------------------------------------------------------------------------------------------------


def order(facts: Facts) -> list[Row]:
    """Every row: those that apply first, in the order in which to try; then those that do not, with the reason."""
    kind, _ = answer(facts)
    single = [_micro_batch(facts), _checkpoint(facts), _offload(facts)]
    if facts.fits is None:
        single.sort(key=lambda a: (a.cost is None, a.cost, -(a.setting.saved_mib if a.setting else 0.0)))
    strategies = [*single, _hybrid(facts, single)]
    other = _other(facts, kind)
    rows = [_keep(facts), _one_at_a_time(facts, strategies)]
    rows += [other, *strategies] if kind == "no" or not feasible(facts) else [*strategies, other]
    return [a for a in rows if a.applies] + [a for a in rows if not a.applies]


def of(facts: Facts, code: str, s: Setting, **more: float) -> Finding:
    """A finding on a setting, with all of its numbers that are known."""
    numbers = {k: float(v) for k, v in asdict(s).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    numbers |= {"saved_ratio": s.saved_mib / facts.peak_mib, **more}
    if facts.compute_ms is not None:
        numbers["compute_ms"] = facts.compute_ms
    return Finding(code, numbers, {"setting": s.name, "phase": s.peak_phase, "direction": s.direction})


def _no(row: str, because: Finding) -> Row:
    return Row(row, False, [because])


def _yes(facts: Facts, row: str, setting: Setting, *because: Finding) -> Row:
    return Row(row, True, list(because), setting.overrides, setting, _cost(facts, setting))


def _refused(facts: Facts, direction: str) -> Finding:
    return next(s.refused for s in facts.extremes if s.direction == direction and s.refused is not None)


def _short(facts: Facts) -> Finding:
    room = facts.room_mib
    return Finding("short", {"room_mib": room}) if room is not None and room < 0 else Finding("in_pieces")


def _not_now(facts: Facts, most: Setting) -> Finding | None:
    """Why a direction whose extreme is `most` does not help here; None where it does."""
    if most.saved_mib < max(COUNTS * facts.peak_mib, facts.gates.get("min_saving_mib", 0.0)):
        return of(facts, "saves_little" if most.saved_mib > 0 else "saves_nothing", most)
    if facts.fits:
        return of(facts, "not_needed", most)
    return of(facts, "not_enough", most) if facts.fits is False and not most.fits else None


def _cost(facts: Facts, s: Setting) -> float | None:
    """Theoretical time that a setting adds, as a share of the step's; None: the link or the card is not known."""
    if not s.moved_mib:
        return s.recompute_flops_ratio
    known = s.transfer_ms is not None and facts.compute_ms
    return s.recompute_flops_ratio + (s.transfer_ms or 0.0) / (facts.compute_ms or 1.0) if known else None


def _keep(facts: Facts) -> Row:
    if facts.fits:
        return Row(KEEP, True, [Finding("fits", {"room_mib": facts.room_mib or 0.0})], ["strategy=baseline"])
    return _no(KEEP, Finding("no_cap") if facts.fits is None else _short(facts))


def _micro_batch(facts: Facts) -> Row:
    extreme = facts.extreme(MICRO)
    if extreme is None:
        return _no(MICRO, _refused(facts, MICRO))
    not_now = _not_now(facts, extreme)
    if not_now is not None:
        return _no(MICRO, not_now)
    chosen = facts.mild(MICRO) or extreme
    because = [of(facts, "one_at_a_time", extreme, samples=facts.global_batch_size, peak_mib=facts.peak_mib)]
    if facts.fits is not None:
        because += [of(facts, "most_at_once", chosen)]
    elif chosen.micro_batch_size > 1:
        because += [of(facts, "at_once", chosen)]
    return _yes(facts, MICRO, chosen, *because)


def _checkpoint(facts: Facts) -> Row:
    found = [s for s in map(facts.extreme, (CHECKPOINT, SELECTIVE)) if s is not None]
    if not found:
        return _no(CHECKPOINT, _refused(facts, CHECKPOINT))
    most = max(found, key=lambda s: (s.fits, s.saved_mib))
    not_now = _not_now(facts, most)
    if not_now is not None:
        return _no(CHECKPOINT, not_now)
    if facts.fits is None:
        # The cheaper form where it saves nearly as much.
        cheap = min(found, key=lambda s: (s.saved_mib < 0.9 * most.saved_mib, s.recompute_flops_ratio))
        return _yes(facts, CHECKPOINT, cheap, of(facts, "recomputes", cheap))
    fitting = [s for s in (facts.mild(CHECKPOINT), *found) if s is not None and s.fits]
    floor = facts.gates.get("min_throughput_ratio") or 0.0
    # The throughput of a step that only FLOPs bind, against the baseline's.
    chosen = next((s for s in fitting if 1 / (1 + s.recompute_flops_ratio) >= floor), None)
    if chosen is None:
        slow = fitting[0]
        return _no(CHECKPOINT, of(facts, "too_slow", slow, left=1 / (1 + slow.recompute_flops_ratio), asked=floor))
    because = _short(facts), of(facts, "can_save", most), of(facts, "least_change", chosen)
    return _yes(facts, CHECKPOINT, chosen, *because)


def _offload(facts: Facts) -> Row:
    extreme = facts.extreme(OFFLOAD)
    if extreme is None:
        return _no(OFFLOAD, _refused(facts, OFFLOAD))
    if not facts.host_holds(extreme):
        return _no(OFFLOAD, of(facts, "host_too_small", extreme, free_mib=facts.host_free_mib or 0.0))
    not_now = _not_now(facts, extreme)
    if not_now is not None:
        return _no(OFFLOAD, not_now)
    if facts.fits is None:
        return _yes(facts, OFFLOAD, extreme, of(facts, "moves", extreme))
    chosen = facts.mild(OFFLOAD) or extreme
    because = [_short(facts), of(facts, "moves", chosen), of(facts, "takes", chosen)]
    milder = [s for s in (facts.mild(MICRO), facts.mild(CHECKPOINT)) if s is not None]
    because += [of(facts, "fits_without_moving", s) for s in milder]
    return _yes(facts, OFFLOAD, chosen, *because)


def _hybrid(facts: Facts, single: list[Row]) -> Row:
    together = [s for s in map(facts.extreme, TOGETHER) if s is not None]
    if not together:
        return _no(HYBRID, _refused(facts, HYBRID))
    lowest = min(together, key=lambda s: s.allocated_mib)
    if facts.fits:
        return _no(HYBRID, _not_now(facts, lowest) or of(facts, "not_needed", lowest))
    alone = [a.setting for a in single if a.applies and a.setting is not None]
    if facts.fits is None:
        best = max(alone, key=lambda s: s.saved_mib, default=None)
        if best is not None and lowest.saved_mib - best.saved_mib < COUNTS * facts.peak_mib:
            return _no(HYBRID, of(facts, "no_more_than_alone", best))
        if lowest.saved_mib <= 0:
            return _no(HYBRID, of(facts, "saves_nothing", lowest))
        return _yes(facts, HYBRID, lowest, of(facts, "goes_lowest", lowest))
    if alone:
        return _no(HYBRID, of(facts, "one_is_enough", alone[0]))
    fitting = [facts.mild(s.direction) or s for s in together if s.fits and facts.host_holds(s)]
    if not fitting:
        return _no(HYBRID, of(facts, "none_fits", lowest))
    chosen = min(fitting, key=lambda s: (_cost(facts, s) is None, _cost(facts, s) or 0.0))
    return _yes(facts, HYBRID, chosen, of(facts, "enough_together", chosen))


def _one_at_a_time(facts: Facts, strategies: list[Row]) -> Row:
    gates, strict = facts.gates, []
    for key, asked in gates.items():
        if key == "min_throughput_ratio" and asked >= STRICT_THROUGHPUT:
            strict.append(
                Finding("little_throughput", {"asked": asked, "left_ratio": max(0.0, 1 - asked)}, {"key": key})
            )
        elif key == "max_eval_loss_ratio" and asked <= STRICT_LOSS:
            strict.append(Finding("within_seeds", {"asked": asked}, {"key": key}))
        elif key in ("min_samples_per_s", "max_eval_loss"):
            strict.append(Finding("only_measured", {"asked": asked}, {"key": key}))
    if not strict:
        asked_for = {"min_throughput_ratio", "max_eval_loss_ratio"} & set(gates)
        return _no(ONE_AT_A_TIME, Finding("gates_leave_room" if asked_for else "no_gate"))
    seeds = ["measure.seeds=5"] if {"max_eval_loss_ratio", "max_eval_loss"} & set(gates) else []
    first = next((a for a in strategies if a.applies), None)
    overrides = ["strategy=baseline"] if facts.fits or first is None else first.overrides
    return Row(ONE_AT_A_TIME, True, strict, [*overrides, "measure.repeats=5", *seeds])


def _other(facts: Facts, kind: str) -> Row:
    if facts.fits:
        return _no(OTHER, Finding("fits_as_it_is"))
    nothing_fits = not feasible(facts)
    if kind == "yes" and not nothing_fits:
        return _no(OTHER, Finding("strategies_lower_it"))
    changes, beside = changes_beside(facts)
    if beside is not None:
        where = of(facts, "peak_beside", beside)
    elif kind == "no":
        in_optimizer = facts.baseline.peak_phase == Phase.optimizer.value
        where = Finding("baseline_in_optimizer" if in_optimizer else "baseline_in_lasting")
    elif kind == "in part":
        where = Finding("activations_in_part")
    else:
        where = of(facts, "none_fits", facts.lowest) if facts.lowest is not None else Finding("none_applies")
    if not changes:
        return Row(OTHER, True, [where, Finding("smaller_or_larger")])
    free = [w for w in changes if w.change in FREE]
    if nothing_fits:  # what fits comes first
        fitting = [w for w in changes if facts.limits.known and fits(facts, w)]
        first = next((w for w in free if w in fitting), (fitting or changes)[0])
    else:
        first = next(iter(free), changes[0])
    saved = {"saved_mib": first.saved_mib or first.reserved_saved_mib}
    code = "change" if not facts.limits.known else "change_fits" if fits(facts, first) else "change_not_enough"
    effect = Finding(code, saved, {"override": first.override})
    return Row(OTHER, True, [where, effect], ["mode=diagnose", *first.override.split()])


def changes_beside(facts: Facts) -> tuple[list[WhatIf], Setting | None]:
    """The changes that help where the strategies stop, and the setting that they were predicted beside.

    None: the baseline, where no strategy saves anything or nothing helps beside the lowest.
    """
    lowest = facts.lowest
    if lowest is None or not facts.what_if_lowest or lowest.saved_mib < COUNTS * facts.peak_mib:
        return facts.what_if, None
    return facts.what_if_lowest, lowest


def fits(facts: Facts, change: WhatIf) -> bool:
    """Whether a change of the workload brings the peak under every limit that is known."""
    room = facts.limits.room_mib(change.allocated_mib, change.reserved_mib)
    return change.fits and (room is None or room >= 0)
