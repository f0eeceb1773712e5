"""A diagnosis before any strategy: what fills the memory, how low it can get, what each direction could save.

Plain data, to and from JSON with sweep.results. `Facts` come from predictions (sweep.diagnose.predict); what follows
from them is decided in sweep.diagnose.advice, without torch. Sizes are MiB; everything is predicted.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from sweep.results import Evidence, Finding, Prediction, WhatIf

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
        return shlex.join(["python", "train.py", *self.overrides])

    @property
    def first(self) -> Row | None:
        """The first row that applies."""
        return next((a for a in self.order if a.applies), None)
