"""What a trial leaves behind: plain data, to and from JSON, with the unit in every name.

Sizes are MiB (2**20 bytes), times milliseconds unless the name says otherwise. `None` means "not known", never zero.
Nothing here needs torch, so reports are made where no torch is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from sweep.interrupts import whole

#: Coverage of every interval that is shown.
CONFIDENCE = 0.95


@dataclass
class Conditions:
    """The machine while steps were timed. `None`: not known here."""

    cpu_others: float | None = None  # cores that other processes kept busy, on average
    cpu_cores: int | None = None  # that this process may use
    gpu_clock_mhz: float | None = None  # lowest reading of the SM clock
    gpu_throttled: list[str] = field(default_factory=list)  # why the driver held the clock down, in NVML's words
    gpu_other_processes: int | None = None
    gpu_other_mib: float | None = None  # their device memory
    disturbed: list[str] = field(default_factory=list)  # codes: why the times may not be this trial's alone


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
    outcome: str = ""  # of one that did not
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
    failed: dict[str, str] = field(default_factory=dict)  # what could not be recorded of these files, and the error


#: The named ranges of a trace. "other" is the step's time outside of all.
RANGES = ("data", "forward", "backward", "recompute", "copy to host", "copy from host", "optimizer", "other")


@dataclass
class Finding:
    """Something that was found: a code, its numbers (units in their names) and what it names (trials, modules, ...).

    Worded in sweep.report.phrases.
    """

    code: str
    numbers: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


@dataclass
class Advice:
    """What to do next: `overrides` to type behind the trial's own command; none where a person has to do something."""

    code: str
    overrides: list[str] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    own: bool = True  # a setting of this strategy; False: another strategy, or another workload
    ran_as: str = ""  # name of the trial of the comparison that was run so already


@dataclass
class Moment:
    """A place in a step."""

    phase: str
    operator: str = ""
    module: str = ""


@dataclass
class Part:
    """One term of a change, in the change's unit."""

    name: str  # a code: see `part_of` for memory and sweep.decide.causes for time
    value: float  # negative: less than the baseline
    before: float = 0.0
    after: float = 0.0


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
    before: Moment | None = None  # where the baseline's peak lies
    after: Moment | None = None
    peak: Change | None = None
    time: Change | None = None
    total_by: str = "ledger"  # whose number the peak is: ledger | allocator | replay (of the allocator)
    quiet: bool = False  # the step times cannot be told apart
    notes: list[Finding] = field(default_factory=list)  # what else its time is made of
    findings: list[Finding] = field(default_factory=list)  # what does not add up or surprises


#: From this share of the peak on, what forward and backward take is what fills it.
FROM_ACTIVATIONS = 0.25


def lies_in_activations(peak: Peak) -> bool:
    """Whether a peak is what the strategies can lower: in forward or backward, and made of what these two take."""
    return peak.phase != Phase.optimizer.value and spent_mib(peak) >= FROM_ACTIVATIONS * peak.mib


def spent_mib(peak: Peak) -> float:
    """Activations, and the temporaries beside them: what depends on how much is computed at once."""
    return sum(peak.at_peak_mib.get(c.value, 0.0) for c in (Category.activation, Category.temporary))


@dataclass
class WhatIf:
    """The peak under a change that is no strategy: it changes the workload, so it is no candidate of the comparison."""

    override: str  # such as workload.optimizer.implementation=fused
    allocated_mib: float  # predicted
    reserved_mib: float
    saved_mib: float  # against the trial it belongs to
    peak_phase: str
    peak_operator: str
    change: str = ""  # which one it is: fused, sgd, ...
    reserved_saved_mib: float = 0.0
    phase_saved_mib: float = 0.0  # off the highest point of the phase in which the trial's peak lies
    fits: bool = True  # the device's capacity; True where none is known


MIB = 2**20
log = logging.getLogger("sweep.results")
T = TypeVar("T")


class Outcome(str, Enum):
    """How a trial ended."""

    ok = "ok"
    over_budget = "over_budget"  # predicted not to fit, so it was not run
    oom_device = "oom_device"
    oom_host = "oom_host"
    nan = "nan"
    timeout = "timeout"
    crashed = "crashed"  # the process died
    invalid = "invalid"  # not equivalent to the baseline, or not predictable
    failed = "failed"  # any other error


class Evidence(str, Enum):
    """How a number was obtained, weakest first."""

    predicted = "predicted"  # nothing was run
    cpu = "cpu"  # run on a CPU: memory is the ledger's, times are a CPU's
    smoke = "smoke"  # run on a GPU, too short to conclude
    measured = "measured"  # run on a GPU with enough steps and repeats


class Verdict(str, Enum):
    accept = "accept"
    tune = "tune"
    reject = "reject"


class Category(str, Enum):
    """What a piece of memory holds. `host` is beside the device, all others on it."""

    parameter = "parameter"
    buffer = "buffer"
    gradient = "gradient"
    optimizer_state = "optimizer_state"
    activation = "activation"  # alive from forward into backward
    input = "input"
    temporary = "temporary"
    host = "host"


class Phase(str, Enum):
    """The parts of an optimizer step, and evaluation. recompute and transfer lie inside forward or backward."""

    data = "data"
    forward = "forward"
    backward = "backward"
    recompute = "recompute"
    optimizer = "optimizer"
    transfer = "transfer"
    evaluation = "evaluation"  # of held-out batches, outside of the steps


@dataclass
class Holder:
    """One of the largest owners of memory at the peak."""

    name: str  # module or parameter name, or the operator where there is none
    category: str
    mib: float
    count: int = 1  # tensors that were added up


@dataclass
class Peak:
    """The highest point of the device memory that the ledger saw, and what was alive there."""

    mib: float
    phase: str
    operator: str  # the operator whose allocation made the peak, such as aten.mm
    module: str  # the module that was running, "" outside of any
    at_peak_mib: dict[str, float] = field(default_factory=dict)  # by category, device only; sums to `mib`
    largest: list[Holder] = field(default_factory=list)
    phase_peaks_mib: dict[str, float] = field(default_factory=dict)  # highest point within each phase
    host_peak_mib: float = 0.0  # highest sum of host copies (offload)
    temporary_mib: dict[str, float] = field(default_factory=dict)  # the temporaries there, by the phase they came in
    #: What was alive at the highest point of each phase, by category.
    at_phase_peak_mib: dict[str, dict[str, float]] = field(default_factory=dict)


#: Temporaries that are accounted for by themselves, by the phase that made them.
TOLD_APART = {
    "recompute": "recomputed",  # activations, computed again
    "transfer": "brought_back",  # from host memory
    "optimizer": "optimizer_temporary",
}


def part_of(category: str, phase: str) -> str:
    """The part of an account that a piece of memory belongs to: its category, temporaries told apart."""
    return TOLD_APART.get(phase, category) if category == Category.temporary.value else category


@dataclass
class Band:
    """A phase without those inside of it, as a piece of a timeline's axis."""

    phase: str
    start: int  # position
    stop: int


@dataclass
class Timeline:
    """Device memory over one optimizer step. A position is one allocation or its end, in order: no time."""

    events: int  # allocations and ends in the step
    positions: list[int]  # some of them where there are too many; the highest point of each piece is kept
    mib: dict[str, list[float]]  # by part (see `part_of`), parallel to `positions`
    phases: list[Band]
    peak_position: int
    peak: Peak
    evidence: str


#: How caveats begin that leave no doubt about `fits`.
WHOSE_PEAK = ("the batches differ in shape", "the peak is in evaluation")


@dataclass
class Prediction:
    """What a step would take on a device. Nothing was run: theoretical, never a gain."""

    device: str
    allocated_mib: float
    reserved_mib: float
    fits: bool
    headroom_mib: float | None  # capacity less reserved and context; negative: short by so much; None: not known
    capacity_mib: float | None
    context_mib: float  # driver and CUDA context, outside of both statistics
    peak: Peak | None = None
    to_host_mib: float = 0.0  # moved in one optimizer step
    from_host_mib: float = 0.0
    transfer_round_trip_ms: float | None = None  # theoretical, at the device's link bandwidth
    recompute_flops_ratio: float = 0.0  # recomputed FLOPs over those of a step without recomputation
    flops_per_step: float = 0.0
    seconds: float = 0.0  # what predicting took
    error_ratio: float | None = None  # predicted over measured peak, less one; set once measured
    peak_phase: str = ""
    peak_operator: str = ""
    at_peak_mib: dict[str, float] = field(default_factory=dict)
    what_if: list[WhatIf] = field(default_factory=list)  # where the peak does not lie in the activations
    #: What is not counted, not known or to be known, in one line each: shown under the table. See `unsure`.
    caveats: list[str] = field(default_factory=list)
    largest_step: int | None = None  # optimizer step (from 0) with the peak; None: all steps are alike
    shapes_differ: bool = False  # the batches differ in shape
    growth_mib_per_step: float = 0.0  # what every step leaves behind: the peak is no constant
    evaluation_mib: float | None = None  # allocated peak of evaluation; None: not predicted
    block_share: float | None = None  # of the activations that lie in the blocks, where no strategy acts on them
    held_outputs_mib: float = 0.0  # of the peak: outputs that the loop holds until the step ends

    @property
    def moved_mib(self) -> float:
        """To the host and back in one optimizer step."""
        return self.to_host_mib + self.from_host_mib

    @property
    def unsure(self) -> list[str]:
        """The caveats that leave open how much it takes; the others say whose peak it is."""
        return [c for c in self.caveats if not c.startswith(WHOSE_PEAK)]


@dataclass
class Verification:
    """Whether the strategy computes what the baseline computes, from the same seed and batches."""

    passed: bool
    tolerance: float  # largest relative error allowed for this dtype
    max_rel_err: float | None = None  # the largest of those below
    loss_rel_err: float | None = None
    output_rel_err: float | None = None
    grad_rel_err: float | None = None
    grad_worst: str = ""  # the parameter with the largest error
    block_input_grad_rel_err: float | None = None
    buffer_rel_err: float | None = None
    rng_equal: bool | None = None  # None: not comparable (micro-batches draw other masks)
    updates: int = 1  # optimizer steps
    bit_equal: bool = False
    dropout: str = "on"  # "on" | "off" (compared with every random draw fixed)
    scope: str = "full"  # "full", or what was cut: "4 of 24 blocks, batch 2"
    reason: str = ""  # why it failed, in words
    notes: list[str] = field(default_factory=list)
    status: str = ""  # equal | not_equal | not_verified | not_comparable; "": a result of an earlier version
    cause: str = ""  # code of what makes it differ, where that is known: see sweep.trial.verify.Cause
    where: str = ""  # what the cause names: a module, a parameter, an attribute
    steps: int = 1  # optimizer steps compared
    compared_share: float | None = None  # of the parameters: those with a finite gradient that is not zero
    mode: str = "full"  # "full" | "quick" (one step, as the workload is)
    seconds: float = 0.0  # what verifying took, without what is shared with other strategies


@dataclass
class Measurement:
    """What a run showed. Times are medians over all timed steps of all repeats."""

    evidence: str
    steps: int  # timed steps per repeat
    repeats: int
    step_ms: float
    step_ms_low: float  # 25th percentile of the timed steps
    step_ms_high: float  # 75th percentile
    samples_per_s: float
    tokens_per_s: float | None
    peak_allocated_mib: float  # CUDA's own statistic, or the ledger's on a CPU
    peak_reserved_mib: float | None  # CUDA only
    peak: Peak | None = None  # the ledger's explanation
    phases_ms: dict[str, float] = field(default_factory=dict)
    train_loss: list[float] = field(default_factory=list)  # one value per optimizer step, warm-up included
    eval_loss_before: float | None = None
    eval_loss: float | None = None  # held-out loss after the last step
    to_host_mib: float = 0.0  # moved in one optimizer step
    from_host_mib: float = 0.0
    step_times_ms: list[float] = field(default_factory=list)
    step_ms_ci_low: float | None = None  # bootstrap interval of the median; None: too few steps
    step_ms_ci_high: float | None = None
    runs: list[Run] = field(default_factory=list)  # the repeats, interleaved with those of the other trials
    outside_ms: float | None = None  # median time of a step outside of all phases
    largest_step: int | None = None  # optimizer step (from 0) with the peak; None: all steps are alike
    shapes_differ: bool = False  # the batches differ in shape
    growth_mib_per_step: float = 0.0  # what every step leaves behind: the peak is no constant
    evaluation_mib: float | None = None  # allocated peak of evaluation; None: not measured
    caveats: list[str] = field(default_factory=list)  # what is not known of the peak, or is to be known, one line each


@dataclass
class Decision:
    verdict: str
    reasons: list[str] = field(default_factory=list)  # codes, such as over_memory
    findings: list[Finding] = field(default_factory=list)  # one for each reason, with its numbers
    advice: Advice | None = None
    peak_mib: float | None = None
    saved_mib: float | None = None
    throughput_ratio: float | None = None  # to the baseline
    eval_loss_ratio: float | None = None
    cap_mib: float | None = None  # the memory cap that was applied; None: there was none
    step: Difference | None = None  # step time over the baseline's
    quality: Quality | None = None  # None: nothing was evaluated, or there is no baseline
    disturbed: list[Finding] = field(default_factory=list)  # why its times may not be its own


@dataclass
class Comparison:
    """The one verdict over all trials of equal `fixed_id`. Lists run parallel to the results it was made from."""

    fixed_id: str
    workload: str
    device: str
    mode: str
    evidence: str  # the weakest among the trials that ran
    verdict: str  # accept: there is a preferred trial; tune: one can still get there; reject: none can
    preferred: str | None  # name of the one to take, the baseline included (see sweep.decide.verdict.preferred_of)
    preferred_index: int | None = None
    nearest_index: int | None = None  # where nothing is accepted: the trial with the least against it
    baseline: str | None = None
    baseline_index: int | None = None
    cheapest_saving: str | None = None  # name of the one to take should the cap fall below the baseline's peak
    cheapest_index: int | None = None
    feasible: bool = False  # some trial ran (or is predicted) within the whole budget, whether enough is known or not
    cap_mib: float | None = None
    cap_source: str = ""  # "budget.memory_mib" | "device.capacity_mib" | "" (no cap)
    decisions: list[Decision] = field(default_factory=list)
    drift: Drift | None = None  # None: the baseline was not repeated at the end


#: Of result.json. 1: decisions are codes and numbers; before that they held sentences.
VERSION = 1


@dataclass
class TrialResult:
    """Everything that is known about one trial."""

    name: str  # what a person calls it: "checkpoint", or "checkpoint micro_batch_size=4"
    strategy: str
    workload: str
    device: str
    outcome: str
    evidence: str
    is_baseline: bool
    fixed_id: str  # digest of all that must be equal within a comparison (workload, device, measure, mode)
    strategy_id: str = ""  # digest of what the strategy does: with `fixed_id`, what is computed
    mode: str = "measure"  # "measure" | "predict"
    config: dict[str, Any] = field(default_factory=dict)  # resolved
    #: What it is judged by: `config["budget"]`, and those of the jobs that asked for the same computation again.
    budgets: list[dict[str, Any]] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    command: str = ""  # repeats this trial
    data_version: str = ""
    data: dict[str, Any] = field(default_factory=dict)  # what the data source says of itself (`describe()`)
    parameters: int | None = None
    blocks: int | None = None
    block_patterns: list[str] = field(default_factory=list)  # modules taken as blocks, such as "encoder.layers.*"
    block_share: float | None = None  # of the baseline's activations that lies in them; None: not known
    prediction: Prediction | None = None
    prediction_error: str = ""  # why there is none, in a trial that was measured all the same
    verification: Verification | None = None
    measurement: Measurement | None = None
    trace: Trace | None = None  # explain=true: baseline and preferred trial
    decision: Decision | None = None
    error: str = ""  # one line
    reason: str = ""  # code of an outcome other than ok where that alone does not say it (nothing_recomputed)
    capacity_mib: float | None = None  # of the device as it was found; None: not known
    details: str = ""  # the traceback or the child's last output
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    mlflow_run_id: str | None = None
    wall_s: float = 0.0
    started_at: str = ""  # ISO 8601, UTC
    version: int = VERSION

    @property
    def key(self) -> str:
        """Tells trials apart. What was computed for one job lies in the folder of another that asked for it, too."""
        same = f"{self.fixed_id} {self.strategy_id} {self.started_at}" if self.started_at else self.folder
        return self.mlflow_run_id or same

    def join(self, again: TrialResult) -> None:
        """`again` is the same trial as it lies in the folder of another job: judge it by that job's budget, too."""
        self.budgets += [budget for budget in again.budgets if budget not in self.budgets]

    @property
    def peak_mib(self) -> float | None:
        """The peak that decides: measured where there is one, else predicted."""
        if self.measurement is not None:
            return self.measurement.peak_allocated_mib
        return self.prediction.allocated_mib if self.prediction is not None else None


def to_dict(value: Any) -> Any:
    """A result as JSON's own types. Non-finite floats become null, since JSON has none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): to_dict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_dict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_dict(cls: type[T], data: dict[str, Any]) -> T:
    """The inverse of `to_dict`. Keys of a newer version are ignored, so that old reports stay readable.

    Raises TypeError where a field is missing, or is of another type.
    """
    if not isinstance(data, dict):
        raise TypeError(f"a {type(data).__name__} instead of a {cls.__name__}")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{k: _parse(hints[k], v) for k, v in data.items() if k in known})


def _parse(hint: Any, value: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    optional = type(None) in args
    if isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str):
        return hint[value]
    if value is None and (optional or hint in (Any, float)):  # a float that was not finite
        return None
    if optional:
        return _parse(next(a for a in args if a is not type(None)), value)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value)
    expected: Any = origin or hint
    if expected is float:
        expected = (int, float)
    if expected is not Any and not isinstance(value, expected):
        raise TypeError(f"a {type(value).__name__} ({value!r:.40}) instead of a {hint}")
    if origin is list:
        return [_parse(args[0], v) for v in value]
    if origin is dict:
        return {k: _parse(args[1], v) for k, v in value.items()}
    return value


@whole()
def write_json(value: Any, path: Path) -> None:
    """Write a result whole or not at all: a reader or a kill never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(to_dict(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read_trial(path: Path) -> TrialResult:
    """Raises OSError or ValueError where the file holds no result of a trial."""
    result = read_as(TrialResult, path, upgrade)
    Outcome(result.outcome), Evidence(result.evidence)
    return result


def read_trials(folder: Path) -> list[tuple[Path, TrialResult]]:
    """Every result.json below a folder with its trial, by path; what cannot be read is left out, with a warning."""
    return read_all(read_trial, folder, "result.json")


def read_all(read: Callable[[Path], T], folder: Path, name: str) -> list[tuple[Path, T]]:
    """Every file of that name below a folder; those that `read` refuses (OSError, ValueError) cost a warning each."""
    found = []
    for path in sorted(folder.rglob(name)):
        try:
            found.append((path, read(path)))
        except (OSError, ValueError) as error:
            _warn_once(path, " ".join(str(error).split()))
    return found


def upgrade(data: dict[str, Any]) -> dict[str, Any]:
    """What result.json holds, in today's form. Raises ValueError for that of a later version."""
    version = data.get("version", 0)
    if version > VERSION:
        raise ValueError(f"it is of version {version}, written by a newer program; this one reads up to {VERSION}")
    return data if version == VERSION else {**data, "decision": None, "version": VERSION}  # it is decided anew


def read_as(cls: type[T], path: Path, upgraded: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> T:
    """What `write_json` wrote. Raises OSError or ValueError where the file holds something else."""
    try:
        return from_dict(cls, upgraded(json.loads(path.read_text(encoding="utf-8"))))
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"it holds no {cls.__name__}: {error}") from error


@functools.lru_cache(maxsize=1024)
def _warn_once(path: Path, wrong: str) -> None:
    """A command reads its folder more than once."""
    log.warning("%s is left out: it cannot be read (%.200s)", path, wrong)
