"""What else would lower the peak: changes that are no strategies, since they change the workload, each predicted.

A strategy spends memory in another way and computes the same. What is here does not: another optimizer, another number
format, fewer samples or shorter ones. So none of it is a candidate of a comparison, but each may be the only thing that
helps where the peak does not lie in the activations. Every number is predicted, nothing is run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from hydra.utils import get_class
from omegaconf import OmegaConf

from sweep.config.check import typed
from sweep.config.schema import Attention, Config, DeviceConf, Dtype, Implementation, OptimizerName, plain
from sweep.environment import CONF
from sweep.memory.device import resolve_device
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
STRATEGIES = CONF / "strategy"


@dataclass(frozen=True)
class _Change:
    code: str
    override: str  # as typed
    at_peak: bool = False  # it addresses what fills a peak that does not lie in the activations
    follow: tuple[str, ...] = ()  # what interpolations of the composed config set with it
    same_data: bool = True


def config_at(config: Config, words: Sequence[str]) -> Config:
    """A config with words of the command line applied: `strategy=NAME`, `KEY=VALUE`, `~KEY`. Raises as `typed` does."""
    node = OmegaConf.create(plain(config) | {"mode": "predict"})
    for word in words:
        key, _, value = word.partition("=")
        if key == "strategy":
            node.strategy = OmegaConf.load(STRATEGIES / f"{value}.yaml")
        elif key.startswith("~"):
            parent, _, last = key[1:].rpartition(".")
            del OmegaConf.select(node, parent)[last]
        else:
            node.merge_with_dotlist([word])
    return typed(node)


def what_if(
    config: Config, data: DataSource | None, prediction: Prediction, *, at_peak_only: bool = False
) -> list[WhatIf]:
    """Changes of the workload that lower the peak of `prediction`, which was made of `config`, largest saving first.

    Only what applies and saves at least 1 % of the peak (expandable segments: of what is reserved). A change that the
    workload does not allow (a model that has no bfloat16, an optimizer of one's own) is left out.

    data: the workload's data source, where it has been built already.
    at_peak_only: for a trial in passing. Only changes that address what fills this peak, in the order of how little
        they change (a fused optimizer first), and no more than the first that helps; [] where the peak lies in the
        activations, which is what the strategies are for.
    """
    peak, found = prediction.peak, []
    if at_peak_only and (peak is None or lies_in_activations(peak)):
        return []
    for change in _changes(config, prediction):
        if at_peak_only and not change.at_peak:
            continue
        effect = _effect(change, config, data, prediction)
        if effect is not None:
            found.append(effect)
            if at_peak_only:
                break
    return sorted(found, key=lambda w: -(w.saved_mib if w.saved_mib > 0 else w.reserved_saved_mib))


def _effect(change: _Change, config: Config, data: DataSource | None, old: Prediction) -> WhatIf | None:
    """What a change is predicted to save; None where that is too little, or it cannot be made."""
    try:
        new = predict(config_at(config, [*change.override.split(), *change.follow]), data if change.same_data else None)
    except Exception as error:  # what this model or optimizer cannot take is no proposal, and no one's mistake
        log.debug("%s cannot be predicted: %s", change.override, error)
        return None
    saved, less_reserved = old.allocated_mib - new.allocated_mib, old.reserved_mib - new.reserved_mib
    by_reserved = change.override.startswith("device.")
    if (less_reserved / old.reserved_mib if by_reserved else saved / old.allocated_mib) < WORTH_A_LINE:
        return None
    before, after = (p.peak.phase_peaks_mib.get(old.peak_phase, 0.0) if p.peak else 0.0 for p in (old, new))
    return WhatIf(
        change=change.code,
        override=change.override,
        allocated_mib=new.allocated_mib,
        reserved_mib=new.reserved_mib,
        saved_mib=saved,
        peak_phase=new.peak_phase,
        peak_operator=new.peak_operator,
        reserved_saved_mib=less_reserved,
        phase_saved_mib=before - after,
        fits=new.fits,
    )


def _changes(config: Config, prediction: Prediction) -> Iterator[_Change]:
    """Those that change the training least first."""
    w, b = config.workload, config.workload.global_batch_size
    peak = prediction.peak or Peak(0.0, "", "", "")
    if _may_be_fused(config):
        temporary = peak.at_peak_mib.get(Category.temporary.value, 0.0)
        at_peak = peak.phase == Phase.optimizer.value and temporary >= TEMPORARIES * peak.mib
        yield _Change("fused", f"workload.optimizer.implementation={Implementation.fused.name}", at_peak)
    device, unused = resolve_device(config.device), prediction.reserved_mib - prediction.allocated_mib
    if device.type == "cuda" and not device.alloc_conf and unused >= FRAGMENTED * prediction.reserved_mib:
        yield _Change("expandable_segments", "device.alloc_conf=expandable_segments:True")
    if str(w.model.get("attention")).rpartition(".")[2] == Attention.eager.name:
        key = "workload.attention" if w.attention is Attention.eager else "workload.model.attention"
        yield _Change("sdpa", f"{key}=sdpa", follow=("workload.attention=sdpa", "workload.model.attention=sdpa"))
    if w.dtype is Dtype.fp32:
        yield _Change("autocast", f"workload.dtype={'amp_bf16' if has_bf16(device) else 'amp_fp16'}")
    yield from _less_state(config, peak)
    if w.dtype in (Dtype.fp32, Dtype.amp_bf16) and has_bf16(device):
        yield _Change("half_parameters", "workload.dtype=bf16", at_peak=True)
    if b > 1 and micro_batch_size(config.strategy, b) == b:  # in parts, fewer samples change nothing at the peak
        yield _Change("fewer_samples", f"workload.global_batch_size={b // 2}")
    if w.seq_len is not None and w.seq_len > 1 and w.data.get("seq_len") == w.seq_len:  # else the data do not follow
        half = w.seq_len // 2
        longest = [f"workload.model.max_seq_len={half}"] if w.model.get("max_seq_len") == w.seq_len else []
        follow = (f"workload.data.seq_len={half}", *longest)
        yield _Change("shorter_samples", f"workload.seq_len={half}", follow=follow, same_data=False)


def _may_be_fused(config: Config) -> bool:
    """Whether the optimizer could be fused and is not: else `foreach` makes lists as long as the parameters."""
    o = config.workload.optimizer
    if o.implementation is Implementation.fused or o.kwargs.get("fused"):
        return False
    try:
        return o.target is None or "fused" in inspect.signature(get_class(o.target)).parameters
    except Exception:  # a function, or a class that cannot be imported here
        return False


def has_bf16(conf: DeviceConf) -> bool:
    """bfloat16 in hardware: from compute capability 8.0 on; a CPU computes it, however slowly."""
    device = resolve_device(conf)
    if device.type != "cuda" or device.compute_capability is None:
        return device.type != "cuda"
    return int(str(device.compute_capability).split(".")[0]) >= 8


def _less_state(config: Config, peak: Peak) -> Iterator[_Change]:
    """Adam keeps two moments of every parameter, SGD one with momentum and none without."""
    o, state = config.workload.optimizer, peak.at_peak_mib.get(Category.optimizer_state.value, 0.0)
    if o.target is not None or not peak.mib or state < DOMINATES * peak.mib:
        return
    if o.name is OptimizerName.sgd:
        words = [f"~workload.optimizer.kwargs.{k}" for k in o.kwargs if k in ("momentum", "nesterov", "dampening")]
        if words:
            yield _Change("no_momentum", " ".join(words), at_peak=True)
        return
    accepted = inspect.signature(torch.optim.SGD).parameters
    gone = [f"~workload.optimizer.kwargs.{k}" for k in o.kwargs if k not in accepted]
    yield _Change("sgd", " ".join(["workload.optimizer.name=sgd", *gone]), at_peak=True)
