"""A strategy in one's own training loop: `apply` puts it on a model, `micro_batches` divides a batch with its weights.

    with sweep.apply(model, "multirun/.../result.json") as strategy:
        for part, weight in sweep.micro_batches(batch, strategy.micro_batch_size):
            with strategy.forward():
                loss = loss_function(model(part["inputs"]), part["targets"])
            (loss * weight).backward()
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from sweep.config.check import check_strategy
from sweep.config.schema import Placement, StrategyConf, plain
from sweep.config.strategy_names import batch_of, strategy_of
from sweep.environment import CONF
from sweep.errors import BadInput, one_line
from sweep.results import TrialResult, read_trial
from sweep.strategy import Applied, applied, check_blocks
from sweep.tracking.store import artifact
from sweep.workload import Batch, find_blocks
from sweep.workload.data import leaves_of, samples_in
from sweep.workload.loss import IGNORED
from sweep.workload.step import Phases, split

#: The options of the config group `strategy`, which `apply` knows by name.
OPTIONS = CONF / "strategy"
_RUN_ID = re.compile(r"[0-9a-f]{32}")


class InForce:
    """A strategy on a model, from when this is made until `remove`, or the end of its `with`.

    conf: what it does. blocks: names of the modules that it takes. micro_batch_size: samples at once, for
    `micro_batches`; None: the whole batch.
    """

    def __init__(self, model: nn.Module, conf: StrategyConf, patterns: Any = None) -> None:
        blocks = find_blocks(model, patterns)
        check_blocks(conf, blocks)
        self.conf, self.blocks, self.micro_batch_size = conf, [b.name for b in blocks], conf.micro_batch_size
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._inside = False
        self._stack = ExitStack()
        self._force: Applied = self._stack.enter_context(
            applied(conf, model, blocks, conf.micro_batch_size or 1, Phases(), device)
        )
        if conf.offload.placement is not Placement.none:
            self._stack.enter_context(self._around(model))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the model and its loss. Needed by offload alone, and only for what is saved outside of the model:
        a model's own forward is inside by itself."""
        if self._inside:
            yield
            return
        self._inside = True
        try:
            with self._force.around_forward():
                yield
        finally:
            self._inside = False

    @contextmanager
    def _around(self, model: nn.Module) -> Iterator[None]:
        """The model's own forward runs inside of `forward`, inside."""
        had, before = "forward" in vars(model), model.forward

        def inside(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return before(*args, **kwargs)
            with self.forward():
                return before(*args, **kwargs)

        model.forward = inside  # type: ignore[method-assign]
        try:
            yield
        finally:
            if had:
                model.forward = before  # type: ignore[method-assign]
            else:
                del model.forward

    def check(self) -> None:
        """Raise NoEffect where nothing was recomputed or moved since it was applied, although that was asked for."""
        self._force.require_effect()

    @property
    def moved_bytes(self) -> int:
        """To the host since it was applied."""
        return self._force.moved.to_host_bytes

    def remove(self) -> None:
        """The model as it was."""
        self._stack.close()

    def __enter__(self) -> InForce:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply(
    model: nn.Module,
    strategy: str | Path | StrategyConf | Mapping[str, Any] | TrialResult | None = None,
    *,
    blocks: Any = None,
    batch_size: int | None = None,
    tracking_uri: str | None = None,
    **settings: Any,
) -> InForce:
    """Put a strategy on `model`, in place; what it returns takes it off again, by `remove` or at the end of a `with`.

    Gradients are those of the model without it, to the last bit (micro-batches: up to rounding).

    strategy: the name of an option of the group `strategy` ("checkpoint"); the path of a result.json, a report.json or
        a sweep's folder (its preferred trial); the id of an MLflow run; or the strategy itself. None: `settings` alone.
    blocks: pattern of module names, or several in a list; None: those of the stored trial, else found by themselves.
    batch_size: samples per optimizer step, for options whose micro-batch is a share of it.
    tracking_uri: where the MLflow run is; None: MLFLOW_TRACKING_URI.
    settings: fields of the strategy, laid over it: micro_batch_size=4, checkpoint={"granularity": "blocks"}.

    Raises BadInput for a strategy that is not there, or does not fit the model.
    """
    conf, stored = resolved(strategy, settings, batch_size, tracking_uri)
    if blocks is None and stored is not None:
        blocks = (stored.config.get("workload") or {}).get("blocks") or stored.block_patterns or None
    return InForce(model, conf, blocks)


def micro_batches(
    batch: Batch, size: int | None, count: Callable[[Batch], float] | None = None
) -> Iterator[tuple[Batch, float]]:
    """The batch in parts of `size` samples, each with the weight of its mean loss: the weighted gradients add up to
    that of the mean over the whole batch, whatever the sizes of the parts.

    batch: any nesting of tensors with the sample as dimension 0. size: None: the whole at once.
    count: what the loss of a part is a mean over. None: its targets where it has any ("targets", or the transformers
        library's "labels" less the first token, without those of -100), else its samples.
    """
    number = count or _count
    whole = number(batch)
    for part in split(batch, size):
        yield part, number(part) / whole if whole else 0.0


def _count(batch: Batch) -> float:
    for name, leaf in leaves_of(batch):
        last = name.rpartition(".")[2]
        if last in ("targets", "labels") and isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dim():
            shifted = leaf[:, 1:] if last == "labels" and leaf.dim() == 2 else leaf
            return int(torch.count_nonzero(shifted != IGNORED))
    return samples_in(batch)


# -- which strategy ---------------------------------------------------------------------------------------------------


def resolved(
    strategy: Any, settings: Mapping[str, Any], batch_size: int | None = None, tracking_uri: str | None = None
) -> tuple[StrategyConf, TrialResult | None]:
    """The strategy that the arguments of `apply` mean, and the stored trial that it comes from. Raises as `apply`."""
    conf, stored = _named(strategy, batch_size, tracking_uri)
    return _laid_over(plain(conf), settings) if settings else conf, stored


def _named(strategy: Any, batch_size: int | None, tracking_uri: str | None) -> tuple[StrategyConf, TrialResult | None]:
    if strategy is None:
        return StrategyConf(name="own"), None
    if isinstance(strategy, StrategyConf):
        return strategy, None
    if isinstance(strategy, Mapping):
        return _laid_over(plain(StrategyConf(name="own")), strategy), None
    if isinstance(strategy, TrialResult):
        return strategy_of(strategy), strategy
    text = str(strategy)
    option, path = OPTIONS / f"{text}.yaml", Path(text)
    if option.is_file() and not path.exists():
        return _option(option, batch_size), None
    if path.exists():
        found = stored_trial(path)
    elif _RUN_ID.fullmatch(text):
        found = _of_run(text, tracking_uri)
    else:
        known = ", ".join(sorted(p.stem for p in OPTIONS.glob("*.yaml")))
        todo = f"give one of {known}, the path of a result.json or report.json, or the id of an MLflow run"
        raise BadInput("strategy", text, "is no strategy, no file and no run", todo)
    conf = strategy_of(found)
    if conf.micro_batch_size is not None and conf.micro_batch_size >= batch_of(found):
        conf = _laid_over(plain(conf), {"micro_batch_size": None})
    return conf, found


def stored_trial(path: Path) -> TrialResult:
    """The trial of a result.json, or the preferred one of a report.json or of a sweep's folder. Raises BadInput."""
    if path.is_dir():
        path = next((p for p in (path / "report.json", path / "result.json") if p.is_file()), path / "report.json")
    try:
        if path.name != "report.json":
            return read_trial(path)
        report = json.loads(path.read_text(encoding="utf-8"))
        name = report["preferred"]
        rows = [report.get("baseline") or {}, *report["candidates"]]
        folder = next((Path(row["folder"]) for row in rows if name is not None and row.get("name") == name), None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        todo = "give a result.json, a report.json or a sweep's folder"
        raise BadInput("strategy", path, f"cannot be read ({error})", todo) from error
    if folder is None:
        raise BadInput("strategy", path, "prefers no trial", "give the result.json of one")
    # The sweep's folder may have been moved, or lie on another machine.
    there = next((f for f in (path.parent / folder.name, folder) if (f / "result.json").is_file()), None)
    if there is None:
        raise BadInput("strategy", path, f"has no {folder.name}/result.json beside it", "give the sweep's whole folder")
    return read_trial(there / "result.json")


def _of_run(run_id: str, uri: str | None) -> TrialResult:
    """The trial of an MLflow run, or the preferred one of a sweep's run."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = artifact(run_id, ("result.json", "report.json"), Path(folder), uri)
            if path.name == "result.json":
                return read_trial(path)
            report = json.loads(path.read_text(encoding="utf-8"))
    except Exception as error:  # whatever a store raises
        todo = "give tracking_uri=..., or the path of its result.json"
        raise BadInput("strategy", run_id, f"cannot be read from its store ({one_line(error)})", todo) from error
    rows = [report.get("baseline") or {}, *report["candidates"]]
    own = next((row.get("mlflow_run_id") for row in rows if row.get("name") == report["preferred"]), None)
    if not own:
        raise BadInput("strategy", run_id, "prefers no trial", "give the id of a trial's run")
    return _of_run(own, uri)


def _option(path: Path, batch_size: int | None) -> StrategyConf:
    node = OmegaConf.load(path)
    whole = OmegaConf.create({"strategy": node, "workload": {"global_batch_size": batch_size}})
    if batch_size is None and "${" in path.read_text(encoding="utf-8"):
        todo = "give batch_size=..., or micro_batch_size=... instead of a name"
        raise BadInput("strategy", path.stem, "is a share of the batch, whose size is not known", todo)
    found = OmegaConf.to_container(whole, resolve=True)
    assert isinstance(found, dict)
    return _laid_over(plain(StrategyConf(name=path.stem)), found["strategy"])


def _laid_over(conf: dict[str, Any], settings: Mapping[str, Any]) -> StrategyConf:
    """A strategy with other fields; types and names are checked."""
    try:
        node = OmegaConf.merge(OmegaConf.structured(StrategyConf), conf, OmegaConf.create(plain(dict(settings))))
        found = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        key = f"strategy.{error.full_key}" if error.full_key else "strategy"
        wrong = str(error.msg or error).strip().splitlines()[0].rstrip(".")
        todo = "see the fields of sweep.config.schema.StrategyConf"
        raise BadInput(key, dict(settings), wrong, todo) from error
    assert isinstance(found, StrategyConf)
    check_strategy(found)
    return found
