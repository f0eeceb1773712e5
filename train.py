"""The one entry point: `python train.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

import sweep.config.schema  # noqa: F401  registers the typed config
from sweep.cli import guarded, run_job


@hydra.main(version_base="1.3", config_path=str(Path(__file__).resolve().parent / "conf"), config_name="config")
def main(cfg: DictConfig) -> Any:
    return run_job(cfg)


if __name__ == "__main__":
    sys.exit(guarded(main))
