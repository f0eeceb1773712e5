"""Smaller single computations: the global batch in micro-batches, gradients accumulated (see `sweep.step`)."""

from __future__ import annotations

from torch import nn

from sweep.schema import StrategyConf

#: Of timm and inplace_abn: norms that take statistics over the batch without being torch's BatchNorm.
OVER_THE_BATCH = frozenset(("EvoNorm2dB0", "EvoNorm2dB1", "EvoNorm2dB2", "ABN", "InPlaceABN", "InPlaceABNSync"))


def micro_batch_size(strategy: StrategyConf, global_batch_size: int) -> int:
    """Samples per micro-batch; the last one of a window may be shorter."""
    return min(strategy.micro_batch_size or global_batch_size, global_batch_size)


def accumulation_steps(strategy: StrategyConf, global_batch_size: int) -> int:
    return -(-global_batch_size // micro_batch_size(strategy, global_batch_size))


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
