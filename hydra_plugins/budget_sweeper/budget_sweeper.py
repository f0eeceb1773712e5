"""The plugin: hands Hydra's words to `sweep.search.loop` and the candidates that come back to Hydra's launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hydra_plugins.budget_sweeper import config as _registered  # noqa: F401


class BudgetSearchPath(SearchPathPlugin):
    """Makes the groups hydra/sweeper and hydra/sweeper/sampler known; an app's own files of these names come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("budget_sweeper", f"file://{Path(__file__).parent / 'conf'}")


class BudgetSweeper(Sweeper):
    """See `config.py` for the arguments."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.hydra_context: HydraContext | None = None
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None
        self.task_function: TaskFunction | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config, self.task_function = hydra_context, config, task_function
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from sweep.search.hydra import run_sweep  # Optuna is imported only when a sweep really starts

        assert self.hydra_context is not None
        assert self.config is not None
        assert self.launcher is not None
        assert self.task_function is not None
        return run_sweep(self.settings, arguments, self.hydra_context, self.config, self.launcher, self.task_function)
