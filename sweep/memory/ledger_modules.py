"""Which module is running, by its qualified name: a stack kept by forward hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ModuleNames:
    """Hooks on the modules of a model. `stack` holds the names of those that are running, innermost last.

    marked(sequence_number, name): called whenever another module begins to make graph nodes, with the number of the
    next node; not while `paused` (recomputation makes nodes that never run).
    """

    def __init__(self, marked: Callable[[int, str], None]) -> None:
        self.stack: list[str] = []
        self.paused = False
        self._marked = marked
        self._hooks: list[Any] = []

    def install(self, model: nn.Module, prefix: str = "") -> None:
        for name, module in model.named_modules():
            if name:
                self._hooks.append(module.register_forward_pre_hook(self._opener(prefix + name)))
                self._hooks.append(module.register_forward_hook(self._closer(prefix + name), always_call=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.stack.clear()

    def _opener(self, name: str) -> Callable[..., None]:
        def opened(*_: Any) -> None:
            self.stack.append(name)
            self._mark()

        return opened

    def _closer(self, name: str) -> Callable[..., None]:
        def closed(*_: Any) -> None:
            # Recomputation stops early by an exception, which may skip the end of inner modules.
            while self.stack and self.stack.pop() != name:
                pass
            self._mark()

        return closed

    def _mark(self) -> None:
        if not self.paused:
            self._marked(torch.autograd._get_sequence_nr(), self.stack[-1] if self.stack else "")
