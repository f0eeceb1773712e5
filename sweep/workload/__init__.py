"""Workloads: model, data, loss and optimizer, built from a config and fixed within a comparison."""

from sweep.workload.build import (
    Block,
    DataSource,
    Loss,
    Workload,
    build_data,
    build_loss,
    build_model,
    build_optimizer,
    build_outline,
    build_scheduler,
    build_workload,
    compiled_module,
    find_blocks,
    patterns_of,
    to_device,
)
from sweep.workload.data import Batch, map_batch

__all__ = [
    "Batch",
    "Block",
    "DataSource",
    "Loss",
    "Workload",
    "build_data",
    "build_loss",
    "build_model",
    "build_optimizer",
    "build_outline",
    "build_scheduler",
    "build_workload",
    "compiled_module",
    "find_blocks",
    "map_batch",
    "patterns_of",
    "to_device",
]
