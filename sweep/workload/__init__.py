"""Workloads: model, data, loss and optimizer, built from a config and fixed within a comparison."""

from sweep.workload.build import (
    Batch,
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
    find_blocks,
    map_batch,
    patterns_of,
    to_device,
)

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
    "find_blocks",
    "map_batch",
    "patterns_of",
    "to_device",
]
