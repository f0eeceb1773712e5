"""What is known beside a trial's plain numbers: repeats, the machine's state, a trace, differences and their causes.

All plain data, to and from JSON with sweep.results. Sizes are MiB, times milliseconds unless the name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Coverage of every interval that is shown.
CONFIDENCE = 0.95


@dataclass
class Conditions:
    """The machine while steps were timed. `None`: not known here."""

    cpu_others: float | None = None  # cores that other processes kept busy, on average
    gpu_clock_mhz: float | None = None  # lowest reading of the SM clock
    gpu_clock_max_mhz: float | None = None  # what the card can do
    gpu_temperature_c: float | None = None  # highest reading
    gpu_power_w: float | None = None  # highest reading
    gpu_throttled: list[str] = field(default_factory=list)  # why the driver held the clock down, in NVML's words
    gpu_other_processes: int | None = None
    gpu_other_mib: float | None = None  # their device memory
    disturbed: list[str] = field(default_factory=list)  # why the times may not be this trial's alone, in words


@dataclass
class Run:
    """One repeat: the workload built anew, its warm-up and its timed steps."""

    index: int  # round, counted from 0; the rounds of a comparison are interleaved (A B A B)
    seed: int
    started_at: str  # ISO 8601, UTC
    step_times_ms: list[float] = field(default_factory=list)
    phases_ms: dict[str, float] = field(default_factory=dict)  # median over the timed steps
    train_loss: list[float] = field(default_factory=list)  # one value per optimizer step, warm-up included
    eval_loss_before: float | None = None
    eval_loss: float | None = None  # held-out loss after the last step; None: this seed was evaluated before
    peak_allocated_mib: float | None = None  # CUDA only
    peak_reserved_mib: float | None = None  # CUDA only
    evaluation_mib: float | None = None  # CUDA only: allocated peak of evaluation
    notes: list[str] = field(default_factory=list)  # what is to be known of its numbers, one line each
    to_host_mib: float = 0.0  # moved in one optimizer step
    from_host_mib: float = 0.0
    fresh_process: bool = False
    at_end: bool = False  # the baseline's last, after all other trials of the comparison: it gives the drift
    conditions: Conditions | None = None
    error: str = ""  # why it did not come to its end; its times then do not count
    phase_times_ms: dict[str, list[float]] = field(default_factory=dict)  # of each step, parallel to step_times_ms


@dataclass
class Difference:
    """A ratio of two medians with its interval (CONFIDENCE). `none`: inside the noise, and so called no difference."""

    ratio: float
    low: float
    high: float
    none: bool


@dataclass
class Drift:
    """The machine's own change over a comparison: the baseline's last repeat over its first."""

    first_ms: float
    last_ms: float
    difference: Difference
    minutes: float  # between the two


@dataclass
class Quality:
    """Held-out loss against the baseline's, paired by seed. Loss differences, candidate less baseline."""

    verdict: str  # "equal" (within noise) | "better" | "worse" | "unknown" (too few seeds to tell)
    seeds: int
    loss: float  # mean over the seeds
    loss_low: float | None  # interval of the mean; None with one seed
    loss_high: float | None
    difference: float  # mean over the seeds
    difference_low: float | None
    difference_high: float | None
    curve_outside_ratio: float | None  # share of the optimizer steps whose mean training loss lies outside of the band
    why: str = ""


@dataclass
class Trace:
    """A few steps under torch.profiler. The profiler slows a step down, so shares count here and not the times."""

    evidence: str
    steps: int  # optimizer steps profiled
    step_ms: float  # mean, under the profiler
    ranges_ms: dict[str, float] = field(default_factory=dict)  # per step; own time of each named range (see RANGES)
    device_busy_ms: float | None = None  # per step, kernels on the device; CUDA only
    copy_ms: float | None = None  # per step, the strategy's copies between host and device; CUDA only
    copy_hidden_ms: float | None = None  # the part of them that ran beside kernels
    device_ms: dict[str, float] = field(default_factory=dict)  # per step, kernels by the range that launched them; CUDA
    operators: int = 0  # per step, as the host called them
    micro_steps: int = 1
    files: list[str] = field(default_factory=list)  # beside result.json: trace, memory timeline, allocator snapshot
    notes: list[str] = field(default_factory=list)


#: The named ranges of a trace. "other" is the step's time outside of all.
RANGES = ("data", "forward", "backward", "recompute", "copy to host", "copy from host", "optimizer", "other")


@dataclass
class Part:
    """One term of a change."""

    name: str
    value: float  # in the change's unit; negative: less than the baseline
    words: str = ""


@dataclass
class Change:
    """A difference to the baseline, taken apart. `total` = sum of the parts + `residual`."""

    unit: str  # "MiB" | "ms"
    before: float
    after: float
    total: float
    parts: list[Part] = field(default_factory=list)  # largest first
    residual: float = 0.0
    closes: bool = True  # the residual is at most 5 % of the total or of the largest part, or inside the noise (times)


@dataclass
class Explanation:
    """Why a candidate's peak and step time differ from the baseline's."""

    baseline: str
    candidate: str
    evidence: str
    moment_before: str  # where the baseline's peak lies, in words: phase, operator, module
    moment_after: str
    peak: Change | None = None
    time: Change | None = None
    words: list[str] = field(default_factory=list)  # whole sentences, most important first
    findings: list[str] = field(default_factory=list)  # what does not add up or surprises


@dataclass
class WhatIf:
    """The peak under a change that is no strategy: it changes the workload, so it is no candidate of the comparison."""

    override: str  # such as workload.optimizer.implementation=fused
    allocated_mib: float  # predicted
    reserved_mib: float
    saved_mib: float  # against the trial it belongs to
    peak_phase: str
    peak_operator: str
    words: str = ""  # what it is and what it pays with
    reserved_saved_mib: float = 0.0
    phase_saved_mib: float = 0.0  # off the highest point of the phase in which the trial's peak lies
    fits: bool = True  # the device's capacity; True where none is known
