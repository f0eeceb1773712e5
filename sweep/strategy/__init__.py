"""Strategies: how the memory is spent. Applied in one fixed order to any model's blocks, without editing its code.

1. micro-batches: the step runs them (`sweep.workload.step`);
2. checkpointing: patches the blocks' forwards, innermost;
3. offload: saved-tensor hooks around the whole forward, outermost, so that they see what checkpointing leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sweep.config.schema import Granularity, OffloadImplementation, Placement, StrategyConf
from sweep.config.strategy_names import accumulation_steps, micro_batch_size
from sweep.errors import BadInput, NothingOffloaded, NothingRecomputed
from sweep.results import Phase
from sweep.strategy import checkpointing, offload
from sweep.strategy.checkpointing import Recomputed
from sweep.strategy.offload import Moved, SaveOnCpu
from sweep.workload import Batch, Block, Workload, patterns_of
from sweep.workload.step import Phases, StepResult, run_step

__all__ = [
    "Applied",
    "TrainingLoop",
    "accumulation_steps",
    "applied",
    "check_blocks",
    "micro_batch_size",
    "over_the_batch",
    "training",
]


#: Of timm and inplace_abn: norms that take statistics over the batch without being torch's BatchNorm.
OVER_THE_BATCH = frozenset(("EvoNorm2dB0", "EvoNorm2dB1", "EvoNorm2dB2", "ABN", "InPlaceABN", "InPlaceABNSync"))


@dataclass
class Applied:
    """A strategy in force. Hand the first two to `run_step`."""

    micro_batch_size: int  # samples
    around_forward: Callable[[], AbstractContextManager[object]] = nullcontext
    moved: Moved = field(default_factory=Moved)  # bytes since it was applied or reset
    conf: StrategyConf = field(default_factory=StrategyConf)
    blocks: list[Block] = field(default_factory=list)
    recomputed: Recomputed = field(default_factory=Recomputed)  # since it was applied
    called: set[int] | None = None  # offload by blocks: which of them have run since it was applied
    cache_was_on: bool = False

    def require_effect(self) -> None:
        """Raise NoEffect where checkpointing computed nothing again, or offload moved no byte."""
        c, o = self.conf.checkpoint, self.conf.offload
        if c.granularity is not Granularity.none and not self.recomputed.again:
            asked = ", ".join(patterns_of(self.recomputed.asked))
            why = f"{asked}: nothing of it was needed in backward" if self.recomputed.called else _never(asked)
            key = f"strategy.checkpoint.granularity={c.granularity.name}"
            raise NothingRecomputed(f"{key}: no block was computed again: {why}")
        if o.placement is not Placement.none and not self.moved.to_host_bytes:
            key = f"strategy.offload.placement={o.placement.name}"
            if self.called is not None and not self.called and o.placement is not Placement.all:
                asked = ", ".join(patterns_of([b.name for b in self.blocks]))
                raise NothingOffloaded(f"{key}: not one byte was moved: {_never(asked)}")
            raise NothingOffloaded(
                f"{key}: not one byte was moved; lower strategy.offload.min_tensor_kib (now {o.min_tensor_kib:g}) or "
                f"strategy.offload.keep_last (now {o.keep_last}), or choose other blocks"
            )

    def notes(self) -> list[str]:
        """What a reader of the results has to know: which of the blocks took no part, what was changed in the model."""
        found = []
        done = self.recomputed
        for asked, called in (
            (done.asked, done.called),
            ([b.name for b in self.blocks] if self.called else [], {self.blocks[i].name for i in self.called or ()}),
        ):
            missing = [name for name in asked if name not in called]
            if missing and called:
                found.append(f"{len(missing)} of {len(asked)} blocks were never called: {', '.join(missing[:4])}")
        if self.cache_was_on:
            found.append("the model's key/value cache is switched off (use_cache=False): recomputation would grow it")
        return list(dict.fromkeys(found))


def _never(asked: str) -> str:
    return f"the model's forward does not call {asked}; name modules that it calls with workload.blocks"


def check_blocks(conf: StrategyConf, blocks: list[Block]) -> None:
    """Raise BadInput where the strategy does not fit the model's blocks."""
    patched = conf.checkpoint.granularity is not Granularity.none or conf.offload.placement is not Placement.none
    for block in blocks if patched else []:
        if block.module._compiled_call_impl is not None:
            raise BadInput(
                "strategy.name",
                conf.name,
                f"{block.name} is compiled in place, so that nothing can be put around its forward",
                f"compile it as a module of its own: torch.compile({block.name}) instead of {block.name}.compile()",
            )
    checkpointing.check(conf.checkpoint, blocks)
    if conf.offload.implementation is OffloadImplementation.hooks:
        offload.check(conf.offload, blocks)


@contextmanager
def applied(
    conf: StrategyConf,
    model: nn.Module,
    blocks: list[Block],
    global_batch_size: int,
    phases: Phases,
    device: torch.device,
    loss_state: nn.Module | None = None,
) -> Iterator[Applied]:
    """The strategy on the model, inside; the model as it was, afterwards.

    loss_state: what the loss holds (`Workload.loss_state`), which stays on the device as the model does.
    """
    micro = micro_batch_size(conf, global_batch_size)
    force = Applied(micro, conf=conf, blocks=blocks)
    with ExitStack() as stack:
        if conf.checkpoint.granularity is not Granularity.none:
            force.cache_was_on = stack.enter_context(_without_cache(model))
        force.recomputed = stack.enter_context(checkpointing.checkpointing(conf.checkpoint, blocks, phases))
        if conf.offload.placement is Placement.none:
            yield force
            return
        hooks: offload.Offload | SaveOnCpu = (
            SaveOnCpu(phases, device, conf.offload.pin_memory)
            if conf.offload.implementation is OffloadImplementation.save_on_cpu
            else offload.Offload(conf.offload, [model, *filter(None, [loss_state])], blocks, phases, device)
        )
        stack.enter_context(hooks.installed())
        force.around_forward, force.moved = hooks.around_forward, hooks.moved
        force.called = hooks.called if isinstance(hooks, offload.Offload) else None
        yield force


@dataclass
class TrainingLoop:
    """A workload with its strategy in force: every optimizer step that is measured, predicted, traced or verified."""

    workload: Workload
    phases: Phases
    strategy: Applied

    def step(self, index: int, **options: Any) -> StepResult:
        """The optimizer step of that index, its batch drawn in phase `data`."""
        with self.phases(Phase.data):
            batch = self.workload.train_batch(index)
        return self.step_on(batch, **options)

    def step_on(self, batch: Batch, **options: Any) -> StepResult:
        """An optimizer step on a batch of host tensors. options: those of `run_step` that the strategy leaves open."""
        said: dict[str, Any] = {
            "micro_batch_size": self.strategy.micro_batch_size,
            "around_forward": self.strategy.around_forward,
        }
        return run_step(self.workload, batch, self.phases, **(said | options))


@contextmanager
def training(
    workload: Workload, strategy: StrategyConf, phases: Phases, samples: int | None = None
) -> Iterator[TrainingLoop]:
    """The loop that trains a workload under a strategy, inside. samples: of the global batch; None: all of them."""
    w, size = workload, samples or workload.conf.global_batch_size
    with applied(strategy, w.model, w.blocks, size, phases, w.device, w.loss_state) as force:
        yield TrainingLoop(workload, phases, force)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[bool]:
    """The transformers library's models without a key/value cache, inside. Whether there was one."""
    found: dict[int, Any] = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    configs = {key: c for key, c in found.items() if getattr(c, "use_cache", None) is True}
    for config in configs.values():
        config.use_cache = False
    try:
        yield bool(configs)
    finally:
        for config in configs.values():
            config.use_cache = True


def over_the_batch(model: nn.Module) -> str:
    """What in `model`, as it is trained, is known to compute over all samples at once, in words; "" where nothing is.

    Frozen norms do not, nor do those that a model keeps in evaluation mode.
    """
    norms = nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.startswith("Frozen") or not (isinstance(module, norms) or kind in OVER_THE_BATCH):
            continue
        of_batch = not isinstance(module, norms[1])
        # Without running statistics a BatchNorm takes the batch's in evaluation, too.
        if of_batch and (module.training or getattr(module, "running_mean", 0) is None):
            return f"{name} ({kind}) takes statistics over the whole batch"
        if not of_batch and module.training and module.track_running_stats:
            return f"{name} ({kind}) changes its running statistics in every forward"
    return ""
