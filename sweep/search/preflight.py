"""What this project tells a search: its space, whether a candidate is worth a run, what to try first, what came out.

Named in conf/hydra/sweeper/budget.yaml and conf/search/; all live in the process of the command, beside its session.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sweep import interrupts
from sweep.config.addresses import without_hydra, words_of
from sweep.config.check import check_diagnosis, typed
from sweep.config.schema import CheckpointConf, Config, Granularity, Mode, Placement, StrategyConf
from sweep.config.strategy_names import describe, fixed_id, is_baseline, strategy_at, strategy_id
from sweep.decide.verdict import Facts, deciding_peak_mib, grouped, memory_cap
from sweep.errors import BadInput, CannotPredict, NoEffect, NothingOffloaded, NothingRecomputed
from sweep.format import number
from sweep.memory.device import resolve_device
from sweep.results import Outcome, TrialResult, read_trials
from sweep.search.candidate import Answer, Job
from sweep.search.hydra import compositions, space_of, study_name, unused
from sweep.search.loop import Search
from sweep.search.plan import Candidate, Forecast, Judgement, Pieces, make_plan, signature
from sweep.search.space import encode
from sweep.search.study import Record
from sweep.session import Session
from sweep.strategy import check_blocks
from sweep.trial.check import check_trial
from sweep.workload import build_outline, find_blocks

MICRO, GRANULARITY = "strategy.micro_batch_size", "strategy.checkpoint.granularity"
EVERY_K, PARTS = "strategy.checkpoint.every_k", "strategy.checkpoint.parts"
PLACEMENT, FIRST = "strategy.offload.placement", "strategy.offload.blocks"
MIN_KIB = "strategy.offload.min_tensor_kib"

#: A part of a block is worth recomputing by itself from this share of the block's parameters on.
SHARE_OF_A_PART = 0.1


def choices(config: Config) -> dict[str, list[Any]]:
    """The values of each key that the model and the batch allow of `config.search.space`, in the words of Optuna."""
    w, s, offload = config.workload, config.search.space, config.strategy.offload
    sizes = s.micro_batch_sizes or [n for n in range(1, w.global_batch_size + 1) if w.global_batch_size % n == 0]
    found: dict[str, list[Any]] = {MICRO: sorted(set(sizes), reverse=True), GRANULARITY: ["none"], PLACEMENT: ["none"]}
    blocks = find_blocks(build_outline(w), w.blocks)
    if not blocks:
        for key, asked in (("first_blocks", s.first_blocks), ("parts", s.parts)):
            if asked:
                todo = "name them with workload.blocks, or leave it out"
                raise BadInput(f"search.space.{key}", asked, "the model has no repeated blocks", todo)
        return found
    for part in s.parts or ():
        try:
            check_blocks(StrategyConf("", checkpoint=CheckpointConf(Granularity.parts, parts=[part])), blocks)
        except BadInput as error:
            raise BadInput("search.space.parts", part, error.wrong, error.todo) from error
    parts = s.parts if s.parts is not None else _parts_worth_it(blocks[0].module)
    every_k = sorted({k for k in s.every_k if k <= len(blocks)}, reverse=True)
    there = {"blocks": every_k, "selective": s.selective, "parts": parts}
    found[GRANULARITY] += [kind for kind, any_of_it in there.items() if any_of_it]
    found |= {EVERY_K: every_k, PARTS: [f"[{part}]" for part in parts]}
    movable = len(blocks) - offload.keep_last
    for n in s.first_blocks or ():
        if n > movable:
            wrong = f"the model has {len(blocks)} blocks, of which {max(movable, 0)} may be offloaded"
            todo = f"give 1 to {movable}, or lower strategy.offload.keep_last" if movable > 0 else "leave it out"
            raise BadInput("search.space.first_blocks", n, wrong, todo)
    if movable > 0:
        wanted = s.first_blocks or [round(len(blocks) * share) for share in (0.25, 0.5, 0.75)]
        found[FIRST] = [f"first:{n}" for n in sorted({n for n in wanted if 0 < n <= movable})]
        found[PLACEMENT] = [p.name for p in s.placements if p is not Placement.blocks or found[FIRST]]
        found[MIN_KIB] = sorted(set(s.min_tensor_kib)) or [offload.min_tensor_kib]
    return found


def _parts_worth_it(block: Any) -> list[str]:
    whole = sum(p.numel() for p in block.parameters())
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in block.named_children()}
    worth = [name for name, size in sizes.items() if size >= SHARE_OF_A_PART * whole]
    return worth if len(worth) > 1 else []  # a part that is the whole block is no other strategy


class Suggest:
    """The search space of this project: asks an Optuna trial for one strategy."""

    def __init__(self) -> None:
        self._choices: dict[str, list[Any]] | None = None  # of the command's one workload

    def __call__(self, config: DictConfig, trial: Any) -> None:
        if self._choices is None:
            self._choices = choices(typed(config, whole=False))
        c = self._choices
        trial.suggest_categorical(MICRO, c[MICRO])
        granularity = trial.suggest_categorical(GRANULARITY, c[GRANULARITY])
        if granularity == "blocks":
            trial.suggest_categorical(EVERY_K, c[EVERY_K])
        if granularity == "parts":
            trial.suggest_categorical(PARTS, c[PARTS])
        placement = trial.suggest_categorical(PLACEMENT, c[PLACEMENT])
        if placement == "blocks":
            trial.suggest_categorical(FIRST, c[FIRST])
        if placement != "none":
            trial.suggest_categorical(MIN_KIB, c[MIN_KIB])


#: Violation of a limit by a trial that died before a number was known.
UNKNOWN_BY = 1.0
#: What a trial is searched by: numbers of `read`, and of `limits`.
OBJECTIVES, CONSTRAINTS = ("samples_per_s", "peak_mib"), ("memory", "eval_loss", "throughput", "valid")
#: User attribute of a study: the points of its plan, so that a search that is gone on with is not planned again.
PLAN = "plan"


class Preflight:
    """Asked with every candidate before it is run; learns from every trial that has ended."""

    def __init__(self, enabled: bool = True, margin: float = 0.02) -> None:
        self.enabled = enabled
        self.forecast = Forecast(margin)
        self.pieces: Pieces | None = None  # of the plan, for estimates
        self._trial_of: dict[str, int] = {}  # computation -> the trial that measured it
        self._refused: set[str] = set()  # recorded already
        self._not_predictable = False

    def __call__(self, job: Job) -> Answer | None:
        """Let it run, refuse it with its violation, or name the trial that was the same computation."""
        if not self.enabled:
            return None
        try:
            config = resolved(job.config)
            judgement = self.forecast.judge(config)
        except (BadInput, NoEffect) as error:  # a strategy that means nothing, or does not fit the model
            return Answer(Outcome.invalid.value, constraints={"valid": 1.0}, reason=str(error), run=False)
        except CannotPredict as error:
            if not self._not_predictable:
                self.forecast.say(f"candidates are run without a prediction: {error}")
            self._not_predictable = True
            return None
        self._baseline(config, job.session)
        said = estimate(judgement, config)
        expected = {"peak_mib": judgement.allocated_mib, "samples_per_s": self._samples_per_s(config, judgement)}
        if set(job.objectives) <= set(expected):
            said.values = [expected[name] for name in job.objectives]
        said.same_as = self._trial_of.get(said.info["computation"])
        if not judgement.fits and said.same_as is None:
            self._record(job, judgement, said)
        return said

    def learn(self, record: Record) -> None:
        """`record` is a trial of the study that has ended, of this command or an earlier one."""
        info = record.info
        if record.same_as is not None or "computation" not in info:
            return
        if not record.launched and record.folder:
            self._refused.add(info["computation"])
        if not record.launched:
            return
        if record.state == "COMPLETE":
            self._trial_of.setdefault(info["computation"], record.number)
        if info.get("measured_mib"):
            self.forecast.learn(record.number, info["predicted_mib"], info["measured_mib"])
        elif record.outcome == Outcome.oom_device.value:
            self.forecast.learn_out_of_memory(record.number, info["over"])

    def _samples_per_s(self, config: Config, judgement: Judgement) -> float:
        """Estimated; 0 without pieces to estimate from. Only samplers see it, and only for what is not run."""
        if self.pieces is None:
            return 0.0
        whole = config.workload.global_batch_size
        step_ms = self.pieces.step_ms(config.strategy, whole, judgement.prediction.moved_mib)
        # Where nothing that fits could be timed there is nothing to estimate from.
        return whole / step_ms * 1000 if step_ms > 0 and math.isfinite(step_ms) else 0.0

    def _record(self, job: Job, judgement: Judgement, said: Answer) -> None:
        """Leave a result.json and an MLflow run of a refused candidate, once."""
        same = said.info["computation"]
        if job.folder is None or same in self._refused or job.session is None:
            return
        self._refused.add(same)
        folder = unused(job.folder)
        result = job.session.refuse(typed(job.config), folder, job.overrides, judgement.prediction, judgement.reason)
        said.mlflow_run_id, said.folder = result.mlflow_run_id, str(folder)

    def _baseline(self, config: Config, session: Session | None) -> None:
        """A trial runs its baseline first where there is none yet. Where that cannot fit, it is recorded as refused."""
        if session is None or not config.compare or session.baseline_of(config) is not None:
            return
        if is_baseline(config.strategy, config.workload.global_batch_size):
            return
        judgement = self.forecast.judge(replace(config, strategy=StrategyConf(name="baseline")))
        if not judgement.fits:
            session.refuse_baseline(config, judgement.prediction, judgement.reason)


def resolved(node: DictConfig, *, whole: bool = True) -> Config:
    config = typed(node, whole=whole)
    config.device = resolve_device(config.device)
    return config


def estimate(judgement: Judgement, config: Config) -> Answer:
    """What is known of a trial before it is run, without its objectives."""
    predicted_mib, over = judgement.prediction.allocated_mib, judgement.over
    info = {"predicted_mib": predicted_mib, "over": over, "computation": signature(judgement, config)}
    return Answer(constraints={"memory": over}, info=info, reason=judgement.reason, estimated=True)


def read(job: Job, result: TrialResult) -> Answer:
    """What a trial came to: its objectives, and by what share it is beyond each limit."""
    config, m = typed(result.config), result.measurement
    baseline = None if result.is_baseline or job.session is None else job.session.baseline_of(config)
    answer = Answer(
        result.outcome, reason=result.error, mlflow_run_id=result.mlflow_run_id, folder=result.folder,
        constraints=limits(result, baseline, config, job.estimate.constraints.get("memory") if job.estimate else None),
        info=dict(job.estimate.info) if job.estimate else {},
    )  # fmt: skip
    if m is not None and result.outcome == Outcome.ok.value:
        answer.info["measured_mib"] = m.peak_allocated_mib
        found = {"peak_mib": m.peak_allocated_mib, "samples_per_s": m.samples_per_s}
        answer.values = [found[name] for name in job.objectives]
    return answer


def recover(job: Job) -> TrialResult | None:
    """The whole result of a trial whose command was killed before the search was told; None where there is none."""
    config = resolved(job.config)
    assert job.folder is not None
    wanted = (fixed_id(config), strategy_id(config))
    for folder in (job.folder, *sorted(job.folder.parent.glob(f"{job.folder.name}-*"))):
        for _, result in read_trials(folder):
            if (result.fixed_id, result.strategy_id) != wanted or result.outcome == Outcome.over_budget.value:
                continue
            if result.prediction is not None:
                job.estimate = estimate(Forecast().judged(result.prediction, config), config)
            return result
    return None


def verdict(search: Search) -> Record | None:
    """The trial that the report will prefer; None where that is none of this search, or there are several reports."""
    groups = grouped(search.session.results()) if search.session is not None else []
    if len(groups) != 1 or (preferred := groups[0].conclude().preferred_index) is None:
        return None
    folder = groups[0].results[preferred].folder
    return next((r for r in search.records.values() if r.folder == folder and r.feasible and r.same_as is None), None)


def limits(
    result: TrialResult, baseline: TrialResult | None, config: Config, predicted_over: float | None = None
) -> dict[str, float]:
    """By what share a trial is beyond each limit; 0 or below: within. NaN where a peak that is capped is not known."""
    found = dict.fromkeys(CONSTRAINTS, 0.0)
    if result.outcome in (Outcome.oom_device.value, Outcome.oom_host.value):
        # How far beyond it would have gone is not known; a prediction that knew better says more.
        found["memory"] = max(predicted_over or 0.0, 0.01) if predicted_over is not None else UNKNOWN_BY
        return found
    invalid = result.outcome in (Outcome.invalid.value, Outcome.nan.value)
    if invalid or result.reason in (NothingOffloaded.reason, NothingRecomputed.reason):
        return found | {"valid": UNKNOWN_BY}
    if result.outcome == Outcome.timeout.value:
        return found | {"throughput": UNKNOWN_BY}
    facts, budget = Facts.of(result, baseline), config.budget
    if facts.own is None:
        return found
    cap, _ = memory_cap(budget, result.capacity_mib)
    if cap is not None:
        peak = deciding_peak_mib(result)
        found["memory"] = math.nan if peak is None else peak / cap - 1
    ratios = (budget.max_eval_loss_ratio, budget.min_throughput_ratio) if facts.has_reference else (None, None)
    gates = [(facts.own.eval_loss, budget.max_eval_loss), (facts.eval_loss_ratio, ratios[0])]
    floors = [(facts.own.samples_per_s, budget.min_samples_per_s), (facts.throughput_ratio, ratios[1])]
    found["eval_loss"] = max((_beyond(v, most) for v, most in gates if most is not None), default=0.0)
    found["throughput"] = max((_beyond(least, v) for v, least in floors if least is not None), default=0.0)
    return found


def _beyond(value: float | None, most: float | None) -> float:
    """value over `most`, less one; a number that is asked for and not known counts as beyond."""
    if value is None or most is None:
        return UNKNOWN_BY
    return value / most - 1 if most > 0 else UNKNOWN_BY if value > 0 else 0.0


def plan(search: Search) -> list[dict[str, Any]]:
    """The points to try first: the baseline, then those with the best estimates. Made once per study."""
    with interrupts.whole():
        kept = search.study.user_attrs.get(PLAN)
    if kept is not None:
        return list(kept)
    config = resolved(search.space.config, whole=False)
    candidates = _candidates(search, config)
    baseline = next((c for c in candidates if is_baseline(c.strategy, config.workload.global_batch_size)), None)
    points = [] if baseline is None else [baseline.point]
    if config.search.plan_points and len(candidates) > 1 and search.folder is not None:
        preflight = search.preflight if isinstance(search.preflight, Preflight) else Preflight()
        others = [c for c in candidates if c is not baseline]
        search.say(f"planning: timing single micro-steps, then estimating {len(others)} candidates")
        try:
            made = make_plan(config, others, preflight.forecast, config.search.plan_points, search.folder)
        except BadInput:
            raise
        except Exception as error:  # a search without a plan is still a search
            why = f"{type(error).__name__}: {error}"
            search.say(f"no plan could be made ({why}); the sampler begins by itself")
        else:
            preflight.pieces = made.pieces
            spent = f"{made.pieces.seconds:.1f} s of timed micro-steps, {made.predicted} predictions"
            lines = [f"plan after {made.seconds:.1f} s ({spent}); estimates, to be measured:"]
            for r in made.ranked:
                name = describe(r.strategy, config.workload.global_batch_size)
                lines.append(f"  {name}: about {number(r.samples_per_s)} samples/s [predicted]")
            if not made.ranked:
                timed = bool(made.pieces.plain.points)
                nothing = "no candidate is predicted to fit" if timed else "nothing that fits could be timed"
                lines.append(f"  {nothing}; the sampler begins by itself")
            search.say("\n".join(lines))
            points += [r.point for r in made.ranked]
    with interrupts.whole():
        search.study.set_user_attr(PLAN, points)
    return points


def _candidates(search: Search, config: Config) -> list[Candidate]:
    """Every point of a finite space that sets keys of the strategy alone; none of any other space."""
    found, fixed = [], set(search.space.fixed)
    for point in search.points or ():
        strategy = strategy_at(config, [w for w in search.space.overrides(point) if w not in fixed])
        if strategy is None:
            return []
        found.append(Candidate(point, strategy))
    return found


def settle_study(config: DictConfig, root: Path) -> str:
    """Name a search's study and give it a folder of its own, so that the same command again finds both.

    Hydra composes every job anew from the words of the command line, so both are added there, too.
    """
    first = typed(without_hydra(config), whole=False)
    _check_search(first, config.hydra.sweeper)
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    name = study_name(config, f"{first.search.name or 'search'}-{first.workload.name}", hydra.config_loader, root)
    said = config.hydra.overrides.hydra
    settled: dict[str, Any] = {"hydra.sweeper.study_name": name, "hydra.sweeper.resume": True}
    if config.hydra.sweeper.storage is not None and not any(str(w).startswith("hydra.sweep.dir=") for w in said):
        settled["hydra.sweep.dir"] = str(root / "multirun" / name)
    if first.search.name is not None and not any(str(w).startswith("hydra.sweep.subdir=") for w in said):
        settled["hydra.sweep.subdir"] = "${hydra.job.num}"  # the strategy's name would be the one searched from
    with read_write(config), open_dict(config):
        for key, value in settled.items():
            OmegaConf.update(config, key, value)
            said.append(f"{key}={encode(value)}")
    return name


def _check_search(config: Config, sweeper: DictConfig) -> None:
    """Raise BadInput for what a search cannot do, before anything runs."""
    if config.mode is Mode.diagnose:
        check_diagnosis(config)
    if config.mode is not Mode.measure:
        todo = "leave it out, or predict without one: -m 'strategy=glob(*)'"
        raise BadInput("mode", config.mode.value, "a search measures", todo)
    if not config.measure.ledger and config.device.type != "cuda":
        raise BadInput("measure.ledger", False, "a search needs the peak of every trial", "leave it on")
    if OmegaConf.select(sweeper, "read._target_") != "sweep.search.preflight.read":
        return  # a reader of one's own gives what it likes
    for key, known in (("objectives", OBJECTIVES), ("constraints", CONSTRAINTS)):
        for name in sweeper[key]:
            if name not in known:
                todo = f"give {' or '.join(known)}"
                raise BadInput(f"hydra.sweeper.{key}", name, "no trial gives such a number", todo)


def first_job(config: DictConfig) -> DictConfig:
    """One job of a search, the first that can be, to check what all have in common. Raises what is wrong with all.

    A point that cannot be becomes a trial that says so; the config without the words that are searched is no point.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader, base = hydra.config_loader, without_hydra(config)
    space = space_of(config.hydra.sweeper, words_of(config.hydra.overrides.task), loader, base)
    wrong: BadInput | None = None
    checked: dict[str, Any] = {}
    for words in compositions(space):
        job = without_hydra(loader.load_sweep_config(config, words))
        try:
            own = resolved(job)
            check_trial(own, checked)
        except BadInput as error:
            wrong = wrong or error
            continue
        if own.search.name is not None:
            choices(own)
        return job
    assert wrong is not None
    raise wrong
