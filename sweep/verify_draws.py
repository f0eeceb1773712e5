"""Random draws with fixed outcomes, so that a batch and its micro-batches can be compared at all.

Micro-batches draw other dropout masks, noise and permutations than the whole batch does, and are as right. Inside
`FixedDraws` every draw of torch gives one number in all of its elements, by the distribution and by how many draws came
before it in this forward, whichever function or module asks for it: dropout keeps all, noise is some 0.7 standard
deviations, a permutation is a rotation by one. So each sample is computed alike whatever batch it is in, unless the
model mixes samples, and two noisy views of one sample still differ.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GOLDEN = 0.618034


class FixedDraws(TorchDispatchMode):
    """See the module's docstring. `unknown`: operators that drew and could not be given a fixed outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()
        self._drawn = 0

    def begin_forward(self) -> None:
        """The next draw is the first of a micro-batch."""
        self._drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs
        name = func._schema.name.removeprefix("aten::").rstrip("_").removesuffix("_functional").removesuffix("_like")
        if name == "native_dropout":
            keep = 1.0 - given["p"]
            x, kept = given["input"], torch.ones_like(given["input"], dtype=torch.bool)
            return (x.clone(), kept) if given["train"] is False or not keep else (x / keep, kept)
        for rate in ("dropout_p", "dropout"):
            if rate in given:  # fused kernels of attention and of recurrent layers
                return func(**{**given, rate: 0.0}) if given[rate] else func(*args, **kwargs)
        if name.startswith("rrelu_with_noise"):
            middle = (given["lower"] + given["upper"]) / 2
            return func(**{**given, "lower": middle, "upper": middle})
        out = func(*args, **kwargs)
        self._drawn += 1
        value = _outcome(name, given, out, self._drawn * GOLDEN % 1.0)
        if value is None:
            if not name.startswith(("_scaled_dot_product", "_efficient_attention", "_flash_attention", "_fused_sdp")):
                self.unknown.add(name)
            return out
        return out.copy_(value) if isinstance(value, Tensor) else out.fill_(value)


def _outcome(name: str, given: dict[str, Any], out: Any, turn: float) -> Tensor | float | None:
    """What the draw gives, to be written over `out`; another by `turn`, which is in [0, 1). None: not known."""
    uniform, normal = 0.5 + turn / 4, 0.5 + turn / 2
    low, high = given.get("from", given.get("low")), given.get("to", given.get("high"))
    if name in ("rand", "uniform"):
        return (low or 0.0) + (1.0 if high is None else high - (low or 0.0)) * uniform
    if name in ("randn", "normal"):
        mean, std = given.get("mean", 0.0), given.get("std", 1.0)
        return mean + normal * std if isinstance(mean + normal * std, Tensor) else float(mean + normal * std)
    if name == "bernoulli":
        return 1.0 - turn / 8 if out.is_floating_point() else 1.0
    if name in ("randint", "random"):
        return (low or 0) + ((2 if high is None else high) - (low or 0)) // 2
    if name == "randperm":
        return torch.arange(len(out), device=out.device).roll(1)
    if name == "multinomial":
        return given["self"].argsort(dim=-1, descending=True, stable=True)[..., : out.shape[-1]]
    if name == "exponential":
        return normal / given["lambd"]
    if name == "geometric":
        return 1.0
    if name == "cauchy":
        return given["median"] + normal * given["sigma"]
    if name == "log_normal":
        return math.exp(given["mean"] + normal * given["std"])
    if name in ("poisson", "_standard_gamma"):
        return given["self"].round() if name == "poisson" else given["self"]
    if name == "binomial":
        return (given["count"] * given["prob"]).round()
    if name == "_sample_dirichlet":
        return given["self"] / given["self"].sum(-1, keepdim=True)
    return None
