"""A diagnosis before any strategy: what fills the memory, how low it can get, what each direction could save.

Plain data, to and from JSON with sweep.results. `Facts` come from predictions (sweep.diagnose.predict); what follows
from them is decided in sweep.diagnose.advice, without torch. Sizes are MiB; everything is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sweep.results import (
    Category,
    Evidence,
    Prediction,
    WhatIf,
)

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

#: What lasts all through a step whatever the strategy.
LASTING = (Category.parameter, Category.buffer, Category.gradient, Category.optimizer_state)


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
        rooms = []
        if self.budget_mib is not None:
            rooms.append(self.budget_mib - allocated_mib)
        if self.device_mib is not None:
            rooms.append(self.device_mib - reserved_mib)
        return min(rooms, default=None)


@dataclass
class Floor:
    """What a step takes at the highest point of the optimizer's part, where no strategy changes anything."""

    mib: float  # the sum of the categories
    by_category_mib: dict[str, float]
    operator: str = ""  # where a prediction had its peak there
    how: str = ""
    room_mib: float | None = None  # under the limits, the reserved memory taken to be no more than this


@dataclass
class Setting:
    """One strategy as predicted, or why it does not apply."""

    direction: str
    words: list[str]  # as typed: strategy=checkpoint strategy.checkpoint.every_k=2
    name: str = ""  # in words
    why_not: str = ""  # not empty: it does not apply, and nothing below is known
    allocated_mib: float = 0.0
    reserved_mib: float = 0.0
    saved_mib: float = 0.0  # against the baseline's allocated peak
    peak_phase: str = ""
    peak_operator: str = ""
    fits: bool = True  # all limits that are known
    room_mib: float | None = None
    micro_batch_size: int = 1
    accumulation_steps: int = 1
    recompute_flops_ratio: float = 0.0  # recomputed FLOPs over those of a step without
    moved_mib: float = 0.0  # to the host and back, per optimizer step
    transfer_ms: float | None = None  # theoretical, at the link's bandwidth, both ways; None: not known
    host_mib: float = 0.0  # highest sum of host copies


@dataclass
class Gates:
    """What a budget asks beside memory. None: not asked."""

    min_throughput_ratio: float | None = None
    min_samples_per_s: float | None = None
    max_eval_loss_ratio: float | None = None
    max_eval_loss: float | None = None
    min_saving_mib: float | None = None


@dataclass
class Facts:
    """Everything that is decided from."""

    workload: str
    device: str
    baseline: Prediction
    limits: Limits
    floor: Floor
    extremes: list[Setting] = field(default_factory=list)  # the most that each direction could save
    mildest: list[Setting] = field(default_factory=list)  # in a direction, the setting that changes least and fits
    what_if: list[WhatIf] = field(default_factory=list)  # for the baseline
    what_if_lowest: list[WhatIf] = field(default_factory=list)  # for the lowest of the extremes
    gates: Gates = field(default_factory=Gates)
    global_batch_size: int = 1
    blocks: int = 0
    parameters: int | None = None
    here: bool = True  # whether this machine has the device
    host_free_mib: float | None = None  # memory of the host that has the device; None: not known
    compute_ms: float | None = None  # theoretical: FLOPs of the baseline's step at the device's peak rate
    words: list[str] = field(default_factory=list)  # of the command line, without mode and strategy

    def extreme(self, direction: str) -> Setting | None:
        """The extreme of a direction, where it applies."""
        return next((s for s in self.extremes if s.direction == direction and not s.why_not), None)

    def mild(self, direction: str) -> Setting | None:
        return next((s for s in self.mildest if s.direction == direction), None)

    def host_holds(self, setting: Setting) -> bool:
        """Whether the host copies of a setting fit. True where the host's memory is not known."""
        return self.host_free_mib is None or setting.host_mib <= self.host_free_mib

    @property
    def peak_mib(self) -> float:
        return self.baseline.allocated_mib

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
        known = [s for s in self.extremes if not s.why_not]
        least = min((s.allocated_mib for s in known), default=0.0)
        return next((s for s in known if s.allocated_mib <= (1 + ALIKE) * least), None)


@dataclass
class Advice:
    """One row of the order in which to try."""

    row: str  # keep | micro_batch | checkpoint | offload | hybrid | one_at_a_time | other
    title: str
    when: str  # what it is for
    applies: bool
    why: str  # why it applies or does not, with numbers
    words: list[str] = field(default_factory=list)  # of the command to type, beside Facts.words
    setting: Setting | None = None  # what that command is predicted to take
    watch: str = ""
    not_conclude: str = ""
    cost: float | None = None  # theoretical time that it adds, as a share of the step's; None: not known


@dataclass
class Diagnosis:
    """The answer, and what it was made from."""

    answer: str  # yes | no | in part | not known
    sentence: str  # the answer in words
    fit: list[str]  # whether the baseline fits, in words
    facts: Facts | None  # None: the baseline cannot be predicted
    order: list[Advice] = field(default_factory=list)  # those that apply first, in the order in which to try
    feasible: bool = True  # something fits under the limits, or no limit is known
    notes: list[str] = field(default_factory=list)
    workload: str = ""
    device: str = ""
    evidence: str = Evidence.predicted.value
    error: str = ""  # why the baseline cannot be predicted
    command: str = ""  # repeats it
    started_at: str = ""  # ISO 8601, UTC
    seconds: float = 0.0
    folder: str = ""
    mlflow_run_id: str | None = None

    @property
    def first(self) -> Advice | None:
        """The first row that applies."""
        return next((a for a in self.order if a.applies), None)
