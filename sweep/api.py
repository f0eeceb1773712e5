"""The comparison and the prediction from Python, for a model that is there: `sweep.predict` and `sweep.compare`.

    prediction = sweep.predict(model, loss, batch, device="rtx_4090", strategy="checkpoint")
    found = sweep.compare(model, loss, batch, memory_mib=8000)
    print(found)                     # the report that a command prints; found.preferred, found.results

What is not offered here (searches, records in MLflow, a process for each trial) the command has.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from torch import Tensor, nn

from sweep.config.check import typed
from sweep.config.schema import Config, StrategyConf, plain
from sweep.config.strategy_names import describe
from sweep.environment import CONF
from sweep.errors import BadInput
from sweep.memory.device import machine_has, resolve_device
from sweep.report import Report, judge, print_report, write_report
from sweep.report.data import build
from sweep.results import Comparison, Prediction, TrialResult
from sweep.strategy.apply import resolved
from sweep.trial import run_trial
from sweep.trial.predict import predict as predict_config
from sweep.workload import Batch
from sweep.workload.data import leaves_of, part_of, samples_in, shapes_of

#: What configs made here refer to, by a key of its own: a config holds names, not objects.
_objects: dict[str, Any] = {}
_numbers = itertools.count()
STRATEGIES = ("micro_batch", "checkpoint", "checkpoint_selective", "offload", "hybrid")


def model_of(key: str) -> nn.Module:
    """A model of its own for each trial: made by the person's factory, or a copy with the same weights."""
    made: Any = _objects[key]
    if not isinstance(made, nn.Module):
        return made()
    # Each tensor is made by a call, so that a prediction can have it without memory.
    memo: dict[int, Any] = {}
    for tensor in [*made.parameters(), *made.buffers()]:
        with torch.no_grad():
            own = torch.empty_like(tensor).copy_(tensor) if tensor.is_floating_point() else tensor.clone()
        if isinstance(tensor, nn.Parameter):
            own = nn.Parameter(own, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = own
    return copy.deepcopy(made, memo)


def loss_of(key: str) -> Any:
    """The loss; one with parameters anew for each trial."""
    loss = _objects[key]
    return copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss


class Batches:
    """The given batches in turn, held out too."""

    def __init__(self, key: str) -> None:
        self.batches: list[Batch] = _objects[key]
        self.same_shapes = len({shapes_of(b) for b in self.batches}) == 1
        found = hashlib.sha256()
        for name, leaf in (pair for batch in self.batches for pair in leaves_of(batch)):
            flat = leaf.detach().cpu().reshape(-1).contiguous() if isinstance(leaf, Tensor) else None
            found.update(name.encode())
            found.update(repr(leaf).encode() if flat is None else flat.view(torch.uint8).numpy().tobytes())
        self.version = found.hexdigest()[:12]

    def describe(self) -> dict[str, str | int]:
        return {"source": "batches that were given", "batches": len(self.batches)}

    def train_batch(self, step: int, size: int) -> Batch:
        batch = self.batches[step % len(self.batches)]
        return batch if samples_in(batch) == size else part_of(batch, 0, size)

    eval_batch = train_batch


def predict(
    model: nn.Module | Callable[[], nn.Module],
    loss: Callable[[nn.Module, Batch], Tensor],
    batch: Batch | Sequence[Batch],
    *,
    device: str = "auto",
    strategy: Any = "baseline",
    workload: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Prediction:
    """The peak of one optimizer step, MiB, on a device that need not be here. Nothing is run.

    model: a module, or a function that makes one, which takes no memory for its weights.
    loss: of model and batch; its mean over the samples, or its sum where it has `count(batch)`.
    batch: of the size of an optimizer step, host tensors with the sample as dimension 0; several in a list.
    device: a profile of the group `device` ("rtx_4090"), "cpu", or "auto": what is here.
    strategy, settings: as for `sweep.apply`.
    workload: other fields of WorkloadConf: {"dtype": "amp_bf16", "optimizer": {"name": "sgd"}, "blocks": "layers.*"}.

    Raises CannotPredict where it cannot be known, BadInput for what cannot be.
    """
    config = _config(model, loss, batch, device, workload, {"mode": "predict"})
    config.strategy = _strategy(strategy, config, settings)
    return predict_config(config)


@dataclass
class Compared:
    """Trials and what was concluded of them. Printed, it is the report of a command."""

    report: Report

    @property
    def results(self) -> list[TrialResult]:
        return self.report.sections[0].results

    @property
    def comparison(self) -> Comparison:
        return self.report.sections[0].comparison

    @property
    def preferred(self) -> TrialResult | None:
        """The trial to take, for `sweep.apply(model, found.preferred)`; None: none is accepted."""
        return self.report.sections[0].preferred_result

    def write(self, folder: str | Path) -> Report:
        """report.html, report.md, report.json and pictures."""
        s = self.report.sections[0]
        return write_report([(s.group, s.comparison)], Path(folder))

    def plot(self) -> Any:
        """Peak against throughput, as a matplotlib figure; what is alive at the peaks where nothing was timed."""
        from sweep.report import plots

        section = self.report.sections[0]
        return plots.pareto(section) or plots.at_peak(section)

    def __str__(self) -> str:
        text = io.StringIO()
        print_report(self.report, Console(file=text, width=120, highlight=False))
        return text.getvalue().partition("Where to look")[0].strip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from sweep.report.html import html

        return html(self.report)


def compare(
    model: nn.Module | Callable[[], nn.Module],
    loss: Callable[[nn.Module, Batch], Tensor],
    batch: Batch | Sequence[Batch],
    *,
    strategies: Sequence[Any] = STRATEGIES,
    memory_mib: float | None = None,
    device: str = "auto",
    workload: Mapping[str, Any] | None = None,
    measure: Mapping[str, Any] | None = None,
    budget: Mapping[str, Any] | None = None,
) -> Compared:
    """Compare strategies with the baseline: predicted, verified and measured here, in this process; for a device that
    is not here predicted alone. The model that is given is not trained.

    strategies: each as for `sweep.apply`: a name, the path of a stored trial, or a mapping of fields.
    measure, budget: fields of MeasureConf and BudgetConf, such as {"repeats": 5} and {"min_throughput_ratio": 0.8}.
    Otherwise as `predict`.
    """
    more = {"budget": {**(budget or {}), **({} if memory_mib is None else {"memory_mib": memory_mib})}}
    first = _config(model, loss, batch, device, workload, {**more, "measure": dict(measure or {})})
    here = machine_has(resolve_device(first.device))
    config = first if here else _config(model, loss, batch, device, workload, {**more, "mode": "predict"})
    results = []
    for given in ["baseline", *strategies]:
        own = copy.deepcopy(config)
        own.device = resolve_device(own.device)
        own.strategy = _strategy(given, own, {})
        if own.strategy.name == "own":
            own.strategy.name = describe(own.strategy, own.workload.global_batch_size)
        results.append(run_trial(own, own.strategy.name))
    return Compared(build(judge(results), Path()))


def from_training_arguments(arguments: Any) -> dict[str, Any]:
    """`workload` and `strategy` of `predict` for what transformers' TrainingArguments say, on one device.

        said = sweep.from_training_arguments(arguments)
        sweep.predict(model, loss, batch, device="rtx_4090", **said)

    batch: of per_device_train_batch_size x gradient_accumulation_steps samples. Raises BadInput for an optimizer that
    has no equivalent here: give `workload["optimizer"]["target"]` yourself.
    """
    micro, steps = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    name = str(getattr(arguments.optim, "value", arguments.optim))
    betas = {"kwargs": {"betas": [arguments.adam_beta1, arguments.adam_beta2], "eps": arguments.adam_epsilon}}
    known: dict[str, dict[str, Any]] = {
        "adamw_torch": {"name": "adamw", **betas},
        "adamw_torch_fused": {"name": "adamw", "implementation": "fused", **betas},
        "sgd": {"name": "sgd"},
    }
    if name not in known:
        raise BadInput("optim", name, "has no equivalent here", f"give one of {', '.join(known)}")
    scheduler = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
    workload = {
        "global_batch_size": micro * steps,
        "dtype": "amp_bf16" if arguments.bf16 else "amp_fp16" if arguments.fp16 else "fp32",
        "optimizer": {**known[name], "lr": arguments.learning_rate, "weight_decay": arguments.weight_decay},
        "scheduler": {"name": scheduler if scheduler in ("linear", "cosine") else "constant"},
        "grad_clip_norm": arguments.max_grad_norm or None,
        "seed": arguments.seed,
    }
    strategy: dict[str, Any] = {"micro_batch_size": micro if steps > 1 else None}
    if arguments.gradient_checkpointing:
        strategy["checkpoint"] = {"granularity": "blocks"}
    return {"workload": workload, "strategy": strategy}


def _config(
    model: Any, loss: Any, batch: Any, device: str, workload: Mapping[str, Any] | None, more: Mapping[str, Any]
) -> Config:
    batches = list(batch) if isinstance(batch, list) and not isinstance(batch[0], Tensor) else [batch]
    number = next(_numbers)
    keys = {name: f"{name}{number}" for name in ("model", "loss", "batches")}
    _objects.update({keys["model"]: model, keys["loss"]: loss, keys["batches"]: batches})
    profile = CONF / "device" / f"{device}.yaml"
    if not profile.is_file():
        known = ", ".join(sorted(p.stem for p in profile.parent.glob("*.yaml")))
        raise BadInput("device", device, "is no profile of a device", f"give one of {known}")
    node: dict[str, Any] = {
        "workload": {
            "name": type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model"),
            "model": {"_target_": "sweep.api.model_of", "key": keys["model"]},
            "loss": {"_target_": "sweep.api.loss_of", "key": keys["loss"]},
            "data": {"_target_": "sweep.api.Batches", "key": keys["batches"]},
            "global_batch_size": min(map(samples_in, batches)),
            **(workload or {}),
        },
        "strategy": {"name": "baseline"},
        "device": OmegaConf.to_container(OmegaConf.load(profile)),
        "tracking": {"enabled": False},
        **more,
    }
    node["workload"]["name"] = "".join(c if c.isalnum() or c in "_-" else "_" for c in node["workload"]["name"])
    return typed(node)


def _strategy(given: Any, config: Config, settings: Mapping[str, Any]) -> StrategyConf:
    conf = resolved(given, settings, config.workload.global_batch_size)[0]
    return typed({**plain(config), "strategy": plain(conf)}).strategy
