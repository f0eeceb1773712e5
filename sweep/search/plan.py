"""Which candidates to try first: estimated step times of the whole grid, from a few measured pieces.

A step of n micro-batches is taken to last

    n * (plain + recompute + hooks + moved bytes / bandwidth) + update

plain: one micro-step without checkpointing or offload, measured at every micro-batch size that is predicted to fit;
where it does not, one with full checkpointing or offload is measured, less what these add (where no size fits plainly:
less the share of FLOPs that are computed again). recompute: what a kind of checkpointing adds, measured with all blocks
at two sizes, scaled by the share of blocks that are recomputed. hooks and bandwidth: what offload adds with the bytes
that it moves, fitted to measured micro-steps with few and with many bytes; bytes of a candidate are its prediction's.
Sizes in between lie on a line.

Nothing here is run that is predicted not to fit, and an estimate is evidence `predicted`: it orders candidates, and is
never shown as a result.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from sweep.config.check import typed
from sweep.config.device import allocator_capacity
from sweep.config.schema import (
    CheckpointConf,
    Config,
    Granularity,
    OffloadConf,
    Placement,
    StrategyConf,
    WorkloadConf,
    plain,
)
from sweep.config.strategy_names import digest, effective, fixed_id, strategy_id
from sweep.format import mib, percent
from sweep.memory.device import resolve_device
from sweep.results import MIB, Prediction
from sweep.strategy import accumulation_steps, applied, micro_batch_size
from sweep.trial.measure import Progress, no_progress, prepared_device
from sweep.trial.predict import predict
from sweep.trial.process import Died, call
from sweep.workload import DataSource, Workload, build_data, build_outline, build_workload, find_blocks
from sweep.workload.step import Phases, accumulate_gradients, split, update

#: Each micro-step is repeated until it was timed this often, and for this long or this often at most.
LEAST_REPEATS, LEAST_S, MOST_REPEATS = 3, 0.2, 20


@dataclass
class Probed:
    """Milliseconds, the least of several. None where a micro-step went wrong."""

    micro_step_ms: list[float | None] = field(default_factory=list)  # one per strategy, in order
    update_ms: float = 0.0  # clipping, optimizer and scheduler, once per step
    seconds: float = 0.0  # what probing took


def probe(config: Config, strategies: list[StrategyConf], folder: Path) -> Probed:
    """Time one micro-step of each strategy, on CUDA in a process of its own. `strategies` name their micro-batch size.

    folder: of that process's request and answer. Raises RuntimeError where it gave none.
    """
    asked = [plain(s) for s in strategies]
    if config.device.type != "cuda":
        return probe_here(config, asked)
    own = folder / "probe"
    try:
        return call(probe_here, config, own, "probe.json", no_progress, strategies=asked)
    except Died as died:
        raise RuntimeError(f"{died}, see {own / 'stderr.log'}") from died


def probe_here(config: Config, strategies: list[dict[str, Any]], progress: Progress = no_progress) -> Probed:
    """`probe` in this process. strategies: as `plain` gives them."""
    started = time.perf_counter()
    device = prepared_device(config)
    workload, probed = build_workload(config.workload, device), Probed()
    for strategy in (typed({**plain(config), "strategy": s}).strategy for s in strategies):
        try:
            probed.micro_step_ms.append(_micro_step_ms(workload, strategy))
        except Exception:  # a candidate of this kind will say what is wrong itself, should it be run
            probed.micro_step_ms.append(None)
    if any(t is not None for t in probed.micro_step_ms):
        update(workload)  # creates the optimizer's state
        probed.update_ms = _timed(lambda: update(workload), device)
    workload.optimizer.zero_grad(set_to_none=True)
    probed.seconds = time.perf_counter() - started
    return probed


def _micro_step_ms(workload: Workload, strategy: StrategyConf) -> float:
    phases, size = Phases(), strategy.micro_batch_size
    model, blocks, whole = workload.model, workload.blocks, workload.conf.global_batch_size
    with applied(strategy, model, blocks, whole, phases, workload.device, workload.loss_state) as force:
        parts = [next(iter(split(workload.train_batch(0), size)))]
        targets = workload.loss.count(parts[0])

        def micro_step() -> None:
            accumulate_gradients(workload, parts, targets, phases, force.around_forward)

        workload.optimizer.zero_grad(set_to_none=True)
        micro_step()  # warm-up; from the second one on there are gradients to add to, as in a real window
        return _timed(micro_step, workload.device)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    while len(times) < LEAST_REPEATS or (sum(times) < LEAST_S * 1000 and len(times) < MOST_REPEATS):
        wait()
        begun = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - begun) * 1000)
    return min(times)  # whatever disturbs a micro-step makes it longer


@dataclass
class Candidate:
    """One point of the grid: the sampler's words for it, its strategy, and the estimate once it has one."""

    point: Any
    strategy: StrategyConf
    samples_per_s: float = 0.0


@dataclass
class Line:
    """Milliseconds over samples per micro-batch: measured points, a line through the two nearest elsewhere."""

    points: dict[int, float] = field(default_factory=dict)

    def at(self, samples: int) -> float:
        known = sorted(self.points, key=lambda k: (abs(k - samples), k))
        if not known:
            return 0.0
        a = known[0]
        if a == samples or len(known) == 1:
            return self.points[a] * samples / a
        b = known[1]
        slope = (self.points[b] - self.points[a]) / (b - a)
        return max(0.0, self.points[a] + slope * (samples - a))


@dataclass
class Pieces:
    """The measured pieces of a step."""

    plain: Line = field(default_factory=Line)
    recompute: dict[str, Line] = field(default_factory=dict)  # kind of checkpointing -> what it adds with all blocks
    hooks_ms: float = 0.0  # per micro-step under offload
    ms_per_mib: float = 0.0  # moved, to the host and back counted each
    update_ms: float = 0.0
    blocks: int = 0
    seconds: float = 0.0  # what measuring them took

    def step_ms(self, strategy: StrategyConf, global_batch_size: int, moved_mib: float) -> float:
        """moved_mib: to the host and back in one step."""
        micro, steps = micro_batch_size(strategy, global_batch_size), accumulation_steps(strategy, global_batch_size)
        each = self.plain.at(micro) + self.recompute_ms(strategy.checkpoint, micro)
        if is_on(strategy.offload):
            each += self.hooks_ms
        return steps * each + moved_mib * self.ms_per_mib + self.update_ms

    def recompute_ms(self, conf: CheckpointConf, micro: int) -> float:
        if not is_on(conf):
            return 0.0
        line = self.recompute.get(kind(conf), self.recompute.get("blocks", Line()))
        chosen = len(range(0, self.blocks, conf.every_k)) / max(self.blocks, 1)
        return line.at(micro) * (1.0 if conf.granularity is Granularity.segments else chosen)


def is_on(conf: CheckpointConf | OffloadConf) -> bool:
    if isinstance(conf, CheckpointConf):
        return conf.granularity is not Granularity.none
    return conf.placement is not Placement.none


def kind(conf: CheckpointConf) -> str:
    """Candidates of one kind recompute the same in each block that they recompute."""
    return f"parts {'+'.join(conf.parts)}" if conf.granularity is Granularity.parts else conf.granularity.name


def measure_pieces(config: Config, candidates: list[Candidate], forecast: Forecast, folder: Path) -> Pieces:
    """Time the pieces on the device. Only what is predicted to fit is run."""
    whole = config.workload.global_batch_size
    sizes = sorted({micro_batch_size(c.strategy, whole) for c in candidates} | {whole})

    def fits(strategy: StrategyConf) -> bool:
        try:
            return forecast.judge(replace(config, strategy=strategy)).fits
        except Exception:  # not predictable, moves nothing, or does not fit the model: the plan leaves it alone
            return False

    bare = StrategyConf(name="plain")
    plain_sizes = [n for n in sizes if fits(replace(bare, micro_batch_size=n))]
    checkpoints, offloads = ([getattr(c.strategy, part) for c in candidates] for part in ("checkpoint", "offload"))
    recomputing = {kind(c): replace(bare, checkpoint=replace(c, every_k=1)) for c in checkpoints if is_on(c)}
    moving = {
        o.placement: replace(bare, offload=replace(o, min_tensor_kib=0.0))
        for o in offloads
        if o.placement in (Placement.inputs, Placement.all)
    }
    two = _ends(plain_sizes) or sizes
    # Sizes that do not fit plainly are measured with what saves most.
    saving = [s for key, s in (recomputing | moving).items() if key in ("blocks", Placement.all)]
    wanted = [replace(bare, micro_batch_size=n) for n in plain_sizes]
    wanted += [replace(s, micro_batch_size=n) for s in (*recomputing.values(), *moving.values()) for n in two]
    wanted += [replace(s, micro_batch_size=n) for n in sizes if n not in {*plain_sizes, *two} for s in saving]
    wanted = [s for s in wanted if fits(s)]
    probed = probe(config, wanted, folder)
    times = [(s, t) for s, t in zip(wanted, probed.micro_step_ms) if t is not None]
    pieces = Pieces(update_ms=probed.update_ms, seconds=probed.seconds)
    pieces.blocks = len(find_blocks(build_outline(config.workload), config.workload.blocks))

    def moved_mib(s: StrategyConf) -> float:
        return forecast.predicted(replace(config, strategy=s)).moved_mib / accumulation_steps(s, whole)

    def recomputed(s: StrategyConf) -> float:
        return forecast.predicted(replace(config, strategy=s)).recompute_flops_ratio

    fill(pieces, times, moved_mib, recomputed)
    return pieces


def _ends(sizes: list[int]) -> list[int]:
    """The largest size, and one that is much smaller but not the smallest: its time is mostly overhead."""
    if len(sizes) < 2:
        return sizes
    return sorted({sizes[len(sizes) // 2 - 1 if len(sizes) > 2 else 0], sizes[-1]})


def fill(
    pieces: Pieces,
    times: list[tuple[StrategyConf, float]],
    moved_mib: Callable[[StrategyConf], float],
    recomputed: Callable[[StrategyConf], float] = lambda strategy: 0.0,
) -> None:
    """Take measured micro-steps apart.

    moved_mib: what a strategy moves in a micro-step, both ways. recomputed: its FLOPs computed again, as a share.
    """

    def size(s: StrategyConf) -> int:
        return s.micro_batch_size or 0

    measured = {size(s): t for s, t in times if not is_on(s.checkpoint) and not is_on(s.offload)}
    # Where no size fits plainly: recomputing ones, less their share of FLOPs for that. Of several kinds the least
    # counts, since what checkpointing costs beside its FLOPs only adds to a time.
    for s, t in times if not measured else ():
        if not is_on(s.offload):
            pieces.plain.points[size(s)] = min(pieces.plain.points.get(size(s), math.inf), t / (1 + recomputed(s)))
    measured = measured or dict(pieces.plain.points)
    pieces.plain.points.update(measured)
    moved: list[tuple[float, float]] = []  # MiB, ms that they add
    for s, t in times:
        if size(s) not in measured or not (is_on(s.checkpoint) or is_on(s.offload)):
            continue
        added = max(0.0, t - measured[size(s)])
        if is_on(s.offload):
            moved.append((moved_mib(s), added))
        else:
            pieces.recompute.setdefault(kind(s.checkpoint), Line()).points[size(s)] = added
    if moved:
        pieces.hooks_ms, pieces.ms_per_mib = _straight(moved)
    rest: dict[int, list[float]] = {}
    for s, t in times:
        if size(s) not in measured:
            added = pieces.recompute_ms(s.checkpoint, size(s))
            if is_on(s.offload):
                added += pieces.hooks_ms + moved_mib(s) * pieces.ms_per_mib
            rest.setdefault(size(s), []).append(max(0.0, t - added))
    pieces.plain.points.update({n: statistics.mean(found) for n, found in rest.items()})


def _straight(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares of ms = a + b * MiB with neither below zero; a line through zero where all move the same."""
    moved, added = np.array(points).T
    if np.ptp(moved) == 0:
        return 0.0, float(added.sum() / moved.sum()) if moved.sum() > 0 else 0.0
    (start, slope), _ = nnls(np.stack([np.ones_like(moved), moved], 1), added)
    return float(start), float(slope)


def rank(
    config: Config, candidates: Iterable[Candidate], pieces: Pieces, forecast: Forecast, wanted: int
) -> tuple[list[Candidate], int]:
    """The `wanted` candidates with the best estimates among those predicted to fit, best first, each computation once.

    Also returns how many were predicted. Bytes that offload moves are known from the prediction only, so candidates are
    predicted in the order of their estimate without them, until no other can be among the best.
    """
    whole = config.workload.global_batch_size
    order = sorted(
        ((whole / pieces.step_ms(c.strategy, whole, 0.0) * 1000, c) for c in candidates), key=lambda pair: -pair[0]
    )
    best: list[tuple[float, int]] = []  # estimate and minus the position in the order, best first
    seen: set[str] = set()
    too_large: dict[str, int] = {}  # strategy without its micro-batch -> smallest size that does not fit
    predicted = 0
    for position, (at_most, candidate) in enumerate(order):
        if len(best) == wanted and at_most <= best[-1][0]:
            break
        own = replace(config, strategy=candidate.strategy)
        micro = micro_batch_size(candidate.strategy, whole)
        rest = digest(plain(replace(candidate.strategy, micro_batch_size=None)))
        if micro >= too_large.get(rest, whole + 1):
            continue
        predicted += 1
        try:
            judgement = forecast.judge(own)
        except Exception:
            continue
        if not judgement.fits:
            too_large[rest] = micro
            continue
        same = signature(judgement, own)
        if same in seen:
            continue
        seen.add(same)
        speed = whole / pieces.step_ms(candidate.strategy, whole, judgement.prediction.moved_mib) * 1000
        best = sorted([*best, (speed, -position)], reverse=True)[:wanted]
    return [replace(order[-behind][1], samples_per_s=speed) for speed, behind in best], predicted


@dataclass
class Plan:
    """What to try first, and how long planning took."""

    ranked: list[Candidate]  # those that are predicted to fit, best first
    pieces: Pieces
    predicted: int
    seconds: float


def make_plan(config: Config, candidates: list[Candidate], forecast: Forecast, wanted: int, folder: Path) -> Plan:
    """Measure the pieces and rank the grid. `config.device` is resolved. Raises what the workload raises."""
    started = time.perf_counter()
    pieces = measure_pieces(config, candidates, forecast, folder)
    ranked, predicted = rank(config, candidates, pieces, forecast, wanted) if pieces.plain.points else ([], 0)
    return Plan(ranked, pieces, predicted, time.perf_counter() - started)


# -- whether a candidate fits, before it is run ----------------------------------------------------------------------
# Its predicted peak, corrected by what was measured so far, against two limits: `budget.memory_mib` caps the peak of
# allocated memory, as in every verdict, and the device's own capacity (`device.capacity_mib` less driver and context)
# must hold what the allocator has to reserve.

#: A replay that ends out of memory although enough seems free (fragmentation) is over the limit by at least this share.
LEAST_OVER = 1e-3


@dataclass
class Judgement:
    """One candidate's prediction against the limits."""

    prediction: Prediction
    allocated_mib: float  # corrected peak
    over: float  # largest share beyond a limit; feasible when <= 0; -1 without any limit
    reason: str  # which limit, with the numbers

    @property
    def fits(self) -> bool:
        return self.over <= 0


class Forecast:
    """Predicts candidates of one study, and learns from each that is measured.

    The correction is one factor on predicted sizes: the median of measured over predicted peaks; after an out-of-memory
    error that was not foreseen, at least what would have foreseen it.
    """

    def __init__(self, margin: float = 0.02, say: Callable[[str], None] = print) -> None:
        self.margin, self.say = margin, say
        self._measured: dict[int, float] = {}  # trial -> measured over predicted
        self._at_least = 0.0
        self._data: dict[str, DataSource] = {}
        self._known: dict[str, Prediction] = {}

    @property
    def ratio(self) -> float:
        """What predicted sizes are multiplied by."""
        median = statistics.median(self._measured.values()) if self._measured else 1.0
        return max(median, self._at_least)

    def judge(self, config: Config) -> Judgement:
        """Predict and compare. Raises what `predict` raises."""
        return self.judged(self.predicted(config), config)

    def predicted(self, config: Config) -> Prediction:
        key = fixed_id(config) + strategy_id(config)
        if key not in self._known:
            self._known[key] = predict(config, data=self.data_of(config.workload))
        return self._known[key]

    def data_of(self, conf: WorkloadConf) -> DataSource:
        key = digest([plain(conf.data)])
        if key not in self._data:
            self._data[key] = build_data(conf)
        return self._data[key]

    def judged(self, prediction: Prediction, config: Config) -> Judgement:
        ratio, cap = self.ratio, config.budget.memory_mib
        allocated = prediction.allocated_mib * ratio
        by = f" (predicted {mib(prediction.allocated_mib)}, corrected by {ratio:.3f})" if abs(ratio - 1) > 5e-4 else ""
        found = [(-1.0, "no limit is known")]
        if cap is not None:
            found.append((allocated / cap - 1, f"allocated peak {mib(allocated)}{by} of budget.memory_mib={cap:g}"))
        usable, needed = _capacity(config, prediction)
        if usable is not None and needed is not None:
            if prediction.fits:
                over, what = allocated / usable - 1, f"allocated peak {mib(allocated)}{by}"
            else:
                over = needed * ratio / usable - 1
                over = max(over, LEAST_OVER) if ratio >= 1 else over
                what = f"{mib(needed * ratio)} reserved{by}"
            found.append((over, f"{what} of the {mib(usable)} that device.capacity_mib leaves"))
        over, reason = max(found)
        return Judgement(prediction, allocated, over, reason)

    def learn(self, number: int, predicted_mib: float, measured_mib: float) -> None:
        """A trial's peak is known. Says so where it is further from the prediction than the margin."""
        if predicted_mib <= 0 or measured_mib <= 0 or number in self._measured:
            return
        off = measured_mib / predicted_mib / self.ratio - 1
        self._measured[number] = measured_mib / predicted_mib
        if abs(off) > self.margin:
            self.say(
                f"WARNING: prediction and measurement disagree: trial {number} was to take "
                f"{mib(measured_mib / (1 + off))} and took {mib(measured_mib)} ({percent(off, 1, sign=True)}, stated "
                f"margin {percent(self.margin, 1)}); predicted sizes are now multiplied by {self.ratio:.3f}"
            )

    def learn_out_of_memory(self, number: int, over: float) -> None:
        """A trial ran out of memory although its peak was predicted to be `over` (negative) beyond its limit."""
        if over > 0 or over <= -1:
            return
        self._at_least = max(self._at_least, self.ratio / (1 + over) * (1 + LEAST_OVER))
        self.say(
            f"WARNING: trial {number} was predicted to fit with {percent(-over, 1)} to spare and ran out of memory; "
            f"predicted sizes are now multiplied by {self.ratio:.3f}"
        )


def signature(judgement: Judgement, config: Config) -> str:
    """Equal for two candidates that are one computation: equal in all of the workload, device and measurement, and in
    all that the strategy does.

    With all other keys equal, a larger `min_tensor_kib` moves a part of what a smaller one
    moves: all of it, where the bytes are equal.
    """
    p, does = judgement.prediction, effective(config)
    does.pop("offload.min_tensor_kib", None)
    sizes = [round(v * MIB) for v in (p.allocated_mib, p.to_host_mib, p.from_host_mib)]
    return digest([fixed_id(config), does, sizes])


def _capacity(config: Config, prediction: Prediction) -> tuple[float | None, float | None]:
    """MiB that the device leaves to the allocator, and MiB that the strategy needs of them."""
    capacity = allocator_capacity(resolve_device(config.device))
    if capacity is None or prediction.headroom_mib is None:
        return None, None
    return capacity / MIB, capacity / MIB - prediction.headroom_mib
