"""Strategies: how the memory is spent. Applied in one fixed order to any model's blocks, without editing its code.

1. micro-batches: the step runs them (`sweep.step`);
2. checkpointing: patches the blocks' forwards, innermost;
3. offload: saved-tensor hooks around the whole forward, outermost, so that they see what checkpointing leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from sweep.errors import NothingOffloaded
from sweep.schema import OffloadImplementation, Placement, StrategyConf
from sweep.step import Phases
from sweep.strategy import checkpointing, offload
from sweep.strategy.accumulation import accumulation_steps, micro_batch_size, over_the_batch
from sweep.strategy.offload import Moved
from sweep.strategy.save_on_cpu import SaveOnCpu
from sweep.workload import Block

__all__ = ["Applied", "accumulation_steps", "applied", "check_blocks", "micro_batch_size", "over_the_batch"]


@dataclass
class Applied:
    """A strategy in force. Hand the first two to `run_step`."""

    micro_batch_size: int  # samples
    around_forward: Callable[[], AbstractContextManager[object]] = nullcontext
    moved: Moved = field(default_factory=Moved)  # bytes since it was applied or reset
    conf: StrategyConf | None = None

    def require_moved(self) -> None:
        """Raise NothingOffloaded where offload was asked for and no byte has moved."""
        if self.conf is not None and self.conf.offload.placement is not Placement.none and not self.moved.to_host_bytes:
            o = self.conf.offload
            raise NothingOffloaded(
                f"strategy.offload.placement={o.placement.name}: not one byte was moved; lower "
                f"strategy.offload.min_tensor_kib (now {o.min_tensor_kib:g}) or strategy.offload.keep_last "
                f"(now {o.keep_last}), or choose other blocks"
            )


def check_blocks(conf: StrategyConf, blocks: list[Block]) -> None:
    """Raise BadInput where the strategy does not fit the model's blocks."""
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
    with ExitStack() as stack:
        stack.enter_context(checkpointing.checkpointing(conf.checkpoint, blocks, phases))
        if conf.offload.placement is Placement.none:
            yield Applied(micro, conf=conf)
            return
        hooks: offload.Offload | SaveOnCpu = (
            SaveOnCpu(phases, device, conf.offload.pin_memory)
            if conf.offload.implementation is OffloadImplementation.save_on_cpu
            else offload.Offload(conf.offload, [model, *filter(None, [loss_state])], blocks, phases, device)
        )
        stack.enter_context(hooks.installed())
        yield Applied(micro, hooks.around_forward, hooks.moved, conf)
