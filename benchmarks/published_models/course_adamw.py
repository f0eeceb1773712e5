"""AdamW as CS336's course code has it: a Python loop over the parameters that makes new moments at each step.

Each parameter takes several temporaries of its own size, and two defaults of zeros that are made even when the state is
there; the names of one parameter's tensors live until the next parameter's take their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class CourseAdamW(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = parameter.grad.data
                state = self.state[parameter]
                step = state.get("t", 1)
                # The zeros are made whether they are needed or not: dict.get evaluates its default.
                mean_before = state.get("m", torch.zeros_like(grad))
                square_before = state.get("v", torch.zeros_like(grad))
                mean = beta1 * mean_before + ((1 - beta1) * grad)
                square = beta2 * square_before + ((1 - beta2) * torch.square(grad))
                rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
                parameter.data -= rate * mean / (torch.sqrt(square) + eps)
                parameter.data -= lr * decay * parameter.data
                state["m"], state["v"], state["t"] = mean, square, step + 1
        return loss
