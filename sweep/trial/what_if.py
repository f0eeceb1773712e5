"""What else would lower the peak: changes that are no strategies, since they change the workload, each predicted.

A strategy spends memory in another way and computes the same. What is here does not: another optimizer, another number
format, fewer samples or shorter ones. So none of it is a candidate of a comparison, but each may be the only thing that
helps where the peak does not lie in the activations. Every number is predicted, nothing is run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from hydra.utils import get_class

from sweep.config.device import resolve_device
from sweep.config.schema import Attention, Config, DeviceConf, Dtype, Implementation, OptimizerName, WorkloadConf
from sweep.format import mib
from sweep.results import Category, Peak, Phase, Prediction, WhatIf, lies_in_activations
from sweep.strategy import micro_batch_size
from sweep.trial.predict import predict
from sweep.workload import DataSource

log = logging.getLogger(__name__)

#: A change is worth a line from this share of the peak (or of what the allocator reserves) on.
WORTH_A_LINE = 0.01
#: Reserved memory that no tensor is in, as a share of all: from here on fragmentation is called large.
FRAGMENTED = 0.05
#: From this share of the peak on, the optimizer's state dominates enough to ask for an optimizer with less.
DOMINATES = 0.2
#: Temporaries of the optimizer's step that are worth a fused one, as a share of the peak.
TEMPORARIES = 0.05


@dataclass(frozen=True)
class _Change:
    override: str  # as typed
    what: str
    pays: str
    config: Config
    same_data: bool = True
    #: Whether it lowers what is alive at a peak that does not lie in the activations.
    at: Callable[[Peak], bool] = lambda peak: False


def what_if(
    config: Config, data: DataSource | None, prediction: Prediction, *, at_peak_only: bool = False
) -> list[WhatIf]:
    """Changes of the workload that lower the peak of `prediction`, which was made of `config`, largest saving first.

    Only what applies and saves at least 1 % of the peak (expandable segments: of what is reserved).

    data: the workload's data source, where it has been built already.
    at_peak_only: for a trial in passing. Only changes that address what fills this peak, in the order of how little
        they change (a fused optimizer first), and no more than the first that helps; [] where the peak lies in the
        activations, which is what the strategies are for.

    A change that the workload does not allow (a model that has no bfloat16, an optimizer of one's own) is left out.
    """
    changes = _changes(config, prediction)
    if at_peak_only:
        peak = prediction.peak
        if peak is None or lies_in_activations(peak):
            return []
        changes = (change for change in changes if change.at(peak))
    found = []
    for change in changes:
        predicted = _predicted(change, data)
        if predicted is None or not _saves(change, predicted, prediction):
            continue
        found.append(_found(change, predicted, prediction))
        if at_peak_only:
            break
    return sorted(found, key=lambda w: -(w.saved_mib if w.saved_mib > 0 else w.reserved_saved_mib))


def _predicted(change: _Change, data: DataSource | None) -> Prediction | None:
    try:
        return predict(change.config, data if change.same_data else None)
    except Exception as error:  # a change that this model or optimizer cannot take is no proposal, and no one's mistake
        log.debug("%s cannot be predicted: %s", change.override, error)
        return None


def _saves(change: _Change, new: Prediction, old: Prediction) -> bool:
    if change.override.startswith("device."):
        return old.reserved_mib - new.reserved_mib >= WORTH_A_LINE * old.reserved_mib
    return old.allocated_mib - new.allocated_mib >= WORTH_A_LINE * old.allocated_mib


def _found(change: _Change, new: Prediction, old: Prediction) -> WhatIf:
    saved = old.allocated_mib - new.allocated_mib
    in_phase = 0.0
    if old.peak is not None and new.peak is not None:
        in_phase = old.peak.phase_peaks_mib.get(old.peak_phase, 0.0) - new.peak.phase_peaks_mib.get(old.peak_phase, 0.0)
    effect = ""
    if new.peak_phase != old.peak_phase and in_phase - saved >= WORTH_A_LINE * old.allocated_mib:
        # Otherwise the saving looks smaller than the change is, and why it is so small stays hidden.
        where = "the optimizer's step" if old.peak_phase == Phase.optimizer.value else old.peak_phase
        effect = f"; it takes {mib(in_phase)} off {where}, after which the peak lies in {new.peak_phase}"
    return WhatIf(
        override=change.override,
        allocated_mib=new.allocated_mib,
        reserved_mib=new.reserved_mib,
        saved_mib=saved,
        peak_phase=new.peak_phase,
        peak_operator=new.peak_operator,
        words=f"{change.what}{effect}; pays with {change.pays}",
        reserved_saved_mib=old.reserved_mib - new.reserved_mib,
        phase_saved_mib=in_phase,
        fits=new.fits,
    )


# -- the changes, those that change the training least first ---------------------------------------------------------


def _changes(config: Config, prediction: Prediction) -> Iterator[_Change]:
    yield from _fused(config)
    yield from _expandable(config, prediction)
    yield from _fused_attention(config)
    yield from _autocast(config)
    yield from _less_state(config, prediction)
    yield from _half_parameters(config)
    yield from _smaller_batch(config)
    yield from _shorter(config)


def _fused(config: Config) -> Iterator[_Change]:
    """Source of the temporaries: _multi_tensor_adamw in torch/optim/adamw.py makes lists as long as the parameters."""
    o = config.workload.optimizer
    if o.implementation is Implementation.fused or o.kwargs.get("fused") or not _takes_fused(config.workload):
        return
    foreach = o.implementation is Implementation.foreach or (
        o.implementation is Implementation.auto and resolve_device(config.device).type == "cuda"
    )
    as_now = "foreach takes temporaries as large as the parameters" if foreach else "a loop takes some for each tensor"
    if o.implementation is Implementation.auto:
        as_now += ", and is the default here"
    yield _Change(
        "workload.optimizer.implementation=fused",
        f"the fused optimizer updates in one kernel, without temporaries ({as_now})",
        "nothing in time or memory; it rounds differently, so compare the losses",
        _with(config, optimizer=replace(o, implementation=Implementation.fused)),
        at=lambda peak: (
            peak.phase == Phase.optimizer.value
            and peak.at_peak_mib.get(Category.temporary.value, 0.0) >= TEMPORARIES * peak.mib
        ),
    )


def _takes_fused(w: WorkloadConf) -> bool:
    if w.optimizer.target is None:
        return True
    try:
        return "fused" in inspect.signature(get_class(w.optimizer.target)).parameters
    except Exception:
        return False


def _expandable(config: Config, prediction: Prediction) -> Iterator[_Change]:
    device = resolve_device(config.device)
    unused = prediction.reserved_mib - prediction.allocated_mib
    if device.type != "cuda" or device.alloc_conf or unused < FRAGMENTED * prediction.reserved_mib:
        return
    yield _Change(
        "device.alloc_conf=expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment lets the allocator grow its segments "
        "instead of leaving holes; it lowers what is reserved, not what is allocated",
        "nothing in what is computed; drivers on Linux only",
        replace(config, device=replace(device, alloc_conf="expandable_segments:True")),
    )


def _fused_attention(config: Config) -> Iterator[_Change]:
    w = config.workload
    if _plain(w.model.get("attention")) != Attention.eager.value:
        return
    key = "workload.attention" if w.attention is Attention.eager else "workload.model.attention"
    yield _Change(
        f"{key}=sdpa",
        "scaled_dot_product_attention does not store the probabilities where there is a kernel for it",
        "nothing in time; it rounds differently",
        _with(config, attention=Attention.sdpa, model=w.model | {"attention": Attention.sdpa}),
    )


def _autocast(config: Config) -> Iterator[_Change]:
    if config.workload.dtype is not Dtype.fp32:
        return
    dtype = Dtype.amp_bf16 if has_bf16(config.device) else Dtype.amp_fp16
    yield _Change(
        f"workload.dtype={dtype.name}",
        "forward and loss under autocast: activations in 16 bits, parameters and their updates stay in 32",
        "coarser activations and gradients, so compare the losses",
        _with(config, dtype=dtype),
    )


def _half_parameters(config: Config) -> Iterator[_Change]:
    if config.workload.dtype not in (Dtype.fp32, Dtype.amp_bf16) or not has_bf16(config.device):
        return
    yield _Change(
        "workload.dtype=bf16",
        "parameters, gradients and optimizer state in 16 bits, too",
        "updates that are rounded to 8 bits of mantissa, small ones to nothing: the losses may suffer",
        _with(config, dtype=Dtype.bf16),
        at=lambda peak: not lies_in_activations(peak),
    )


def has_bf16(conf: DeviceConf) -> bool:
    """bfloat16 in hardware: from compute capability 8.0 on; a CPU computes it, however slowly."""
    device = resolve_device(conf)
    if device.type != "cuda" or device.compute_capability is None:
        return device.type != "cuda"
    return int(str(device.compute_capability).split(".")[0]) >= 8


def _less_state(config: Config, prediction: Prediction) -> Iterator[_Change]:
    """Adam keeps two moments of every parameter, SGD one with momentum and none without."""
    o = config.workload.optimizer
    peak = prediction.peak
    state = 0.0 if peak is None else peak.at_peak_mib.get(Category.optimizer_state.value, 0.0)
    if o.target is not None or peak is None or state < DOMINATES * peak.mib:
        return
    if o.name is OptimizerName.sgd:
        gone = [k for k in o.kwargs if k in ("momentum", "nesterov", "dampening")]
        words = [f"~workload.optimizer.kwargs.{k}" for k in gone]
        what, so = "SGD without momentum keeps no state", "the learning rate has to be found anew"
    else:
        accepted = inspect.signature(torch.optim.SGD).parameters
        gone = [k for k in o.kwargs if k not in accepted]
        words = ["workload.optimizer.name=sgd", *(f"~workload.optimizer.kwargs.{k}" for k in gone)]
        what, so = "SGD keeps no moments of the parameters", "many models need Adam's, and the learning rate changes"
    kwargs = {k: v for k, v in o.kwargs.items() if k not in gone}
    yield _Change(
        " ".join(words),
        what,
        f"another course of training: {so}",
        _with(config, optimizer=replace(o, name=OptimizerName.sgd, kwargs=kwargs)),
        at=lambda peak: True,
    )


def _smaller_batch(config: Config) -> Iterator[_Change]:
    b = config.workload.global_batch_size
    half = b // 2
    if half < 1 or micro_batch_size(config.strategy, b) < b:
        return  # where the batch is computed in parts, a smaller one changes nothing at the peak
    yield _Change(
        f"workload.global_batch_size={half}",
        f"{half} samples an update instead of {b}",
        "noisier gradients, more updates and another learning rate; strategy=micro_batch computes as few at once and "
        "keeps the update",
        _with(config, global_batch_size=half),
    )


def _shorter(config: Config) -> Iterator[_Change]:
    w = config.workload
    if w.seq_len is None or w.seq_len < 2 or w.data.get("seq_len") != w.seq_len:
        return  # the data do not follow the config
    half = w.seq_len // 2
    model = w.model | ({"max_seq_len": half} if w.model.get("max_seq_len") == w.seq_len else {})
    yield _Change(
        f"workload.seq_len={half}",
        f"sequences of {half} instead of {w.seq_len} tokens",
        "half of the context and of the tokens an update: another task",
        _with(config, seq_len=half, data=w.data | {"seq_len": half}, model=model),
        same_data=False,
    )


def _with(config: Config, **changes: Any) -> Config:
    return replace(config, workload=replace(config.workload, **changes))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Attention) else value
