"""What a study knows, as plain data: its trials, the best ones, and `optimization_results.yaml`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import le
from pathlib import Path
from typing import Any

import optuna
import yaml
from filelock import FileLock
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from sweep.config.addresses import masked, reveal, revealed, without_secrets
from sweep.environment import has_ended
from sweep.errors import BadInput
from sweep.interrupts import whole
from sweep.search.candidate import FAILED, OK, violation
from sweep.search.space import Space, bare
from sweep.tracking.store import check_file

SAMPLER_KEY = "hydra.sweeper.sampler"
#: Exhaustive samplers, and whether they take the points in order. Walking the points ourselves serves enqueued points,
#: conditional keys, resuming and an end once all are known, none of which Optuna's own two serve together.
_WALKS = {"GridSampler": True, "BruteForceSampler": False}


class Sampler:
    """The sampler of a study, or a walk (`exhaustive`), then with `ordered` saying in which order."""

    def __init__(self, conf: Mapping[str, Any], seed: int | None, known_trials: int, objectives: int) -> None:
        """`seed` varies with the number of trials already known, so that a resumed search does not repeat itself."""
        target, key = conf.get("_target_"), f"{SAMPLER_KEY}._target_"
        if not target:
            raise BadInput(key, None, "is missing", "give the import path of an Optuna sampler")
        self.name = str(target).rpartition(".")[2]
        given = conf.get("seed")
        self.seed = seed if given is None else int(given)
        self.exhaustive, self.ordered = self.name in _WALKS, _WALKS.get(self.name, False)
        if self.exhaustive:
            self.optuna: BaseSampler = RandomSampler(seed=self.seed)
            return
        if self.name == "CmaEsSampler" and objectives > 1:
            raise BadInput(key, target, f"cannot serve {objectives} objectives", "use tpe, nsgaii or gp")
        if self.name == "CmaEsSampler" and importlib.util.find_spec("cmaes") is None:
            raise BadInput(key, target, "needs the package cmaes", "pip install cmaes")
        # null means the sampler's own default, so that one config serves every version of Optuna.
        arguments = {k: v for k, v in conf.items() if v is not None and k != "seed"}
        try:
            if self.seed is not None and "seed" in inspect.signature(get_class(str(target))).parameters:
                arguments["seed"] = self.seed + known_trials
            sampler = instantiate(arguments, _convert_="all")
        except Exception as error:
            wrong = f"cannot be made ({' '.join(str(error).split())[:300]})"
            raise BadInput(key, target, wrong, "give an Optuna sampler and its arguments") from error
        if not isinstance(sampler, BaseSampler):
            raise BadInput(key, target, "is no Optuna sampler", "give one such as optuna.samplers.TPESampler")
        self.optuna = sampler


KEY = "hydra.sweeper.storage"
AUTO = "auto"
#: How long a writer waits for another one.
_BUSY_TIMEOUT_S = 60
#: User attributes of a study: its search space, and a digest of what is fixed, key by key.
SPACE, FIXED = "search_space", "fixed_digests"


@whole()
def open_storage(conf: Any, root: Path, working_folder: Path) -> BaseStorage:
    """The storage of `hydra.sweeper.storage`: "auto" (root/mlruns/optuna.db), null (in memory), a URL or a `_target_`.

    Raises BadInput for a database that is MLflow's, no database, not writable or of another Optuna version.
    """
    if conf is None:
        return InMemoryStorage()
    if isinstance(conf, DictConfig):
        return instantiate(revealed(OmegaConf.to_container(conf, resolve=True)), _convert_="all")
    url = f"sqlite:///{root / 'mlruns' / 'optuna.db'}" if conf == AUTO else reveal(str(conf))
    shown = masked(url)
    if not url.startswith("sqlite:///") or ":memory:" in url:
        try:
            return optuna.storages.get_storage(url)
        except Exception as error:  # whatever the database's driver raises
            first = without_secrets((str(error).strip().splitlines() or [type(error).__name__])[0])
            todo = "check the address, that the database runs and its driver is there; null: keep the study in memory"
            raise BadInput(KEY, shown, f"cannot be used ({first})", todo) from error
    file = (working_folder / url.removeprefix("sqlite:///").partition("?")[0]).resolve()
    check_file(file, KEY, shown, "Optuna", "studies")
    try:
        # Several sweeps that make a fresh database at the same time would break each other.
        with FileLock(f"{file}.lock"):
            return RDBStorage(f"sqlite:///{file}", engine_kwargs={"connect_args": {"timeout": _BUSY_TIMEOUT_S}})
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise BadInput(KEY, shown, f"cannot be used ({first})", "give another file, or move this one away") from error


def fixed_digests(config: DictConfig, space: Space, irrelevant: Iterable[str] = ()) -> dict[str, str]:
    """A short digest per key of all that is not searched: tells what changed without storing any value.

    irrelevant: keys, or whole nodes, that change no result.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    left_out = tuple(f"{key}." for key in (*map(bare, space.parameters), *irrelevant))
    return {k: digest_of(v) for k, v in sorted(_flat(plain, "").items()) if not f"{k}.".startswith(left_out)}


def _flat(node: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        found |= _flat(value, name + ".") if isinstance(value, Mapping) and value else {name: value}
    return found


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]


def default_name(app: str, fixed: Mapping[str, str], space: Space) -> str:
    """Equal for commands that ask the same question: the same fixed config and the same searched keys."""
    return f"{app}-{digest_of([fixed, sorted(space.parameters), space.extend_name])}"


def first_free(name: str, taken: Callable[[str], bool]) -> str:
    """The name, or name-2, name-3, ... where it is taken."""
    return next(n for n in itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2))) if not taken(n))


def free_name(storage: BaseStorage, name: str) -> str:
    return first_free(name, set(optuna.get_all_study_names(storage)).__contains__)


@whole()
def open_study(
    storage: BaseStorage,
    name: str,
    space: Space,
    directions: Sequence[str],
    fixed: Mapping[str, str],
    say: Callable[[str], None] = print,
) -> optuna.Study:
    """The study of this name, made if there is none.

    Raises BadInput, before anything is asked, where it was begun with another space or direction.
    """
    if name not in optuna.get_all_study_names(storage):
        wanted = [optuna.study.StudyDirection[d.upper()] for d in directions]
        study = optuna.create_study(study_name=name, storage=storage, directions=wanted)
        study.set_user_attr(SPACE, space.describe())
        study.set_user_attr(FIXED, dict(fixed))
        return study
    study = optuna.load_study(study_name=name, storage=storage)
    _check_question(study, space, directions)
    before: Mapping[str, str] = study.user_attrs.get(FIXED) or fixed
    changed = sorted(k for k in {*before, *fixed} if before.get(k) != fixed.get(k))
    if changed:
        say(
            f"warning: the study {name} was begun with other values of {', '.join(changed)}; "
            "its earlier trials guide the sampler but answer no candidate"
        )
    return study


def _check_question(study: optuna.Study, space: Space, directions: Sequence[str]) -> None:
    # Optuna itself minds the choices of a study that something else has begun.
    described, direction = space.describe(), "hydra.sweeper.direction"
    before = study.user_attrs.get(SPACE, described) | {direction: ",".join(d.name.lower() for d in study.directions)}
    now = described | {direction: ",".join(directions)}
    todo = "go on with that, or give hydra.sweeper.study_name=NAME or hydra.sweeper.resume=false for a new study"
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            wrong = f"was {before.get(key, 'not searched')} when the study {study.study_name} was begun"
            raise BadInput(key, now.get(key, "(not searched)"), wrong, todo)


@whole()
def stale(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that a killed command left running; not those of a living process."""
    running = study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
    owners = [trial.user_attrs.get(JOB, {}).get("owner") for trial in running]
    return [trial for trial, owner in zip(running, owners) if not owner or has_ended(owner)]


@whole()
def close(study: optuna.Study, trials: Iterable[FrozenTrial]) -> None:
    """End them as failed."""
    for trial in trials:
        optuna.Trial(study, trial._trial_id).set_user_attr("reason", "the command that ran it was killed")
        study.tell(trial.number, state=TrialState.FAIL)


#: How a trial's values came about (user attribute VALUE_IS): nothing there means measured.
VALUE_IS, ESTIMATED, PLACEHOLDER = "value_is", "estimated", "placeholder"
#: A trial that was not launched carries why (user attribute): told by the preflight, or known from an earlier trial.
ANSWERED_BY, BY_PREFLIGHT, BY_MEMORY = "answered_by", "preflight", "memory"
#: What is known of a trial before it runs (user attribute): owner, overrides, fixed, folder.
JOB = "job"
RESULTS_FILE = "optimization_results.yaml"


@dataclass
class Record:
    """One trial of a study."""

    number: int
    outcome: str
    params: dict[str, Any] = field(default_factory=dict)
    values: list[float] | None = None  # measured ones only
    estimated_values: list[float] | None = None
    constraints: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    overrides: list[str] = field(default_factory=list)
    folder: str | None = None
    mlflow_run_id: str | None = None
    same_as: int | None = None  # the trial whose measurement answered this one
    seconds: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    # Not written into the summary:
    state: str = "COMPLETE"  # Optuna's: COMPLETE, FAIL, RUNNING
    answered_by: str | None = None
    fixed: str | None = None  # digest of what was not searched

    @property
    def ended(self) -> bool:
        return self.state not in ("RUNNING", "WAITING")

    @property
    def launched(self) -> bool:
        """Whether its job was started, so that it counts towards the number of trials asked for."""
        return self.answered_by is None

    @property
    def violation(self) -> float:
        return violation(self.constraints)

    @property
    def feasible(self) -> bool:
        """Measured, and within all constraints. An estimate is never a result."""
        return self.state == "COMPLETE" and self.values is not None and self.violation <= 0


@whole()
def records(study: optuna.Study) -> list[Record]:
    """All trials that were asked, in order."""
    found = study.get_trials(deepcopy=False)
    return [record(t) for t in found if t.state is not TrialState.WAITING]


def record(trial: FrozenTrial) -> Record:
    attrs = dict(trial.user_attrs.get(JOB, {})) | trial.user_attrs
    complete = trial.state is TrialState.COMPLETE
    values, value_is = list(trial.values) if complete and trial.values else None, attrs.get(VALUE_IS)
    ended_as = OK if complete else FAILED if trial.state.is_finished() else "running"
    same = ("overrides", "reason", "folder", "mlflow_run_id", "same_as", "info", ANSWERED_BY, "fixed")
    return Record(
        number=trial.number,
        outcome=attrs.get("outcome", ended_as),
        params=dict(trial.params),
        values=values if value_is is None else None,
        estimated_values=values if value_is == ESTIMATED else None,
        constraints=dict(trial.constraints),
        seconds=round(trial.duration.total_seconds(), 3) if trial.duration is not None else None,
        state=trial.state.name,
        **{key: attrs[key] for key in same if key in attrs},
    )


def best_first(found: Sequence[Record], directions: Sequence[str]) -> list[Record]:
    """The feasible trials of one objective, best first; of several, the Pareto front in the order of the first one."""
    feasible = [r for r in found if r.feasible and r.same_as is None]
    signs = [-1.0 if d == "maximize" else 1.0 for d in directions]

    def costs(r: Record) -> list[float]:
        return [s * v for s, v in zip(signs, r.values or ())]

    if len(directions) > 1:
        points = [costs(r) for r in feasible]
        beaten = [any(o != c and all(map(le, o, c)) for o in points) for c in points]
        feasible = [r for r, b in zip(feasible, beaten) if not b]
    return sorted(feasible, key=lambda r: (costs(r)[0], r.number))


def least_violating(found: Sequence[Record]) -> Record | None:
    """The trial closest to being feasible, measured ones before estimated ones where they are equal."""
    violating = [r for r in found if r.state == "COMPLETE" and r.violation > 0 and r.same_as is None]
    return min(violating, key=lambda r: (r.violation, r.answered_by is not None, r.number), default=None)


def counts(found: Sequence[Record]) -> dict[str, int]:
    launched = [r for r in found if r.launched]
    return {
        "launched": len(launched),
        "feasible": sum(r.feasible for r in launched),
        "infeasible": sum(r.state == "COMPLETE" and not r.feasible for r in launched),
        "failed": sum(r.state == "FAIL" for r in found if r.same_as is None),
        "not_run": sum(r.answered_by == BY_PREFLIGHT for r in found),
        "answered_from_memory": sum(r.answered_by == BY_MEMORY for r in found),
    }


def write_summary(
    folder: Path, study: optuna.Study, found: Sequence[Record], best: Sequence[Record], sampler: str, ended_because: str
) -> None:
    """Write `optimization_results.yaml` whole or not at all. Its first keys are those of Hydra's own Optuna plugin."""
    said: dict[str, Any] = {"name": "optuna"}
    if len(study.directions) > 1:
        said["solutions"] = [entry(r) for r in best]
    else:
        said["best_params"] = best[0].params if best else None
        said["best_value"] = best[0].values[0] if best and best[0].values else None
        said["best_trial"] = entry(best[0]) if best else None
    if not best:
        nearest = least_violating(found)
        said["least_violating"] = entry(nearest) if nearest is not None else None
    said |= {
        "study": study.study_name,
        "directions": [d.name.lower() for d in study.directions],
        "sampler": sampler,
        "ended_because": ended_because,
        "counts": counts(found),
        "trials": [entry(r) for r in found],
    }
    partial = folder / f"{RESULTS_FILE}.partial"
    plain = json.loads(json.dumps(said, default=str))  # no Python object, tuple or alias gets into the file
    partial.write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), encoding="utf-8")
    partial.replace(folder / RESULTS_FILE)


def entry(r: Record) -> dict[str, Any]:
    """One trial with what is known of it; keys that have nothing to say are left out."""
    said = {k: v for k, v in asdict(r).items() if k not in ("state", ANSWERED_BY, "fixed")}
    return {k: v for k, v in said.items() if v not in (None, "", {}, []) or k in ("number", "outcome", "params")}


# -- pictures of what was measured, by Optuna's own backend ----------------------------------------------------------

SPEED = "throughput (samples/s)"


def draw_study(study: optuna.Study, folder: Path) -> list[Path]:
    """Draw into `folder`; returns the files. What cannot be drawn is left out with a warning."""
    measured = [(t, r) for t in study.get_trials(deepcopy=False) if (r := record(t)).launched and r.values]
    # A copy of what ran: the estimates of what was refused are no measurements. Throughput is the last objective.
    own = optuna.create_study(direction=study.directions[-1])
    for trial, r in measured:
        assert r.values is not None
        own.add_trial(
            optuna.trial.create_trial(
                state=TrialState.COMPLETE, value=r.values[-1], params=trial.params, distributions=trial.distributions
            )
        )
    plots: dict[str, Any] = {"search_history.png": optuna.visualization.matplotlib.plot_optimization_history}
    if len(measured) > 2 and len({r.values[-1] for _, r in measured if r.values}) > 1:
        plots["search_importances.png"] = optuna.visualization.matplotlib.plot_param_importances
    drawn = []
    for name, plot in plots.items() if measured else ():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna's plots are marked experimental
            try:
                plot(own, target_name=SPEED).figure.savefig(folder / name, dpi=120, bbox_inches="tight")
                drawn.append(folder / name)
            except Exception as error:
                warnings.simplefilter("default")
                warnings.warn(f"{name} was not drawn: {error}", RuntimeWarning, stacklevel=2)
    return drawn
