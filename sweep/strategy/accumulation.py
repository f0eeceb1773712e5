"""Smaller single computations: the global batch in micro-batches, gradients accumulated (see `sweep.step`)."""

from __future__ import annotations

from sweep.schema import StrategyConf


def micro_batch_size(strategy: StrategyConf, global_batch_size: int) -> int:
    """Samples per micro-batch; the last one of a window may be shorter."""
    return min(strategy.micro_batch_size or global_batch_size, global_batch_size)


def accumulation_steps(strategy: StrategyConf, global_batch_size: int) -> int:
    return -(-global_batch_size // micro_batch_size(strategy, global_batch_size))
