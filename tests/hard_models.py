"""Blocks that are hard on a strategy: state, randomness, odd arguments, several calls. Each model is a few lines.

All take and give (B, 16) and hold their blocks in `layers` or, where that is the point, elsewhere.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

W = 16


class Noise:
    version = "1"

    def describe(self) -> dict[str, str | int]:
        return {"source": "noise"}

    def train_batch(self, step: int, size: int) -> dict[str, Tensor]:
        x = torch.randn(size, W, generator=torch.Generator().manual_seed(step))
        return {"inputs": x, "targets": x.roll(1, dims=1)}

    def eval_batch(self, index: int, size: int) -> dict[str, Tensor]:
        return self.train_batch(10**6 + index, size)


def mse(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["inputs"]), batch["targets"])


def siamese(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["inputs"]), model(batch["targets"]).detach()) + mse(model, batch)


def gradient_penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss on a gradient: backward goes through a backward."""
    x = batch["inputs"].requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return F.mse_loss(slope, batch["targets"])


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def body() -> Residual:
    return Residual(nn.Linear(W, 2 * W), nn.SiLU(), nn.Linear(2 * W, W))


class Plain(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = body, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stateful(nn.Module):
    """The state that `kind` names, read and changed by each forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = body(), kind
        if kind == "spectral":
            self.body[0] = torch.nn.utils.parametrizations.spectral_norm(self.body[0])
        elif kind == "spectral_old":
            self.body[0] = torch.nn.utils.spectral_norm(self.body[0])
        self.state = None
        make = getattr(self, f"make_{kind}", None)
        if make is not None:
            make()

    def forward(self, x: Tensor) -> Tensor:
        change = getattr(self, f"change_{self.kind}", None)
        return self.body(x if change is None else change(x))

    def make_counter(self) -> None:
        self.state = 0

    def change_counter(self, x: Tensor) -> Tensor:
        self.state += 1
        return x / self.state

    def make_average(self) -> None:
        del self.state
        self.register_buffer("state", torch.ones(W))

    def change_average(self, x: Tensor) -> Tensor:
        self.state.mul_(0.5).add_(x.detach().square().mean(0), alpha=0.5)
        return x / (self.state + 0.1)

    def make_codebook(self) -> None:
        """Larger than what is copied without asking."""
        del self.state
        self.register_buffer("state", torch.randn(1100, W))

    def change_codebook(self, x: Tensor) -> Tensor:
        nearest = self.state[(x.detach() @ self.state.t()).argmax(1)]
        self.state.mul_(0.7).add_(x.detach().mean(0), alpha=0.3)
        return x * nearest

    def make_teacher(self) -> None:
        """A frozen copy that follows the weights, moved by `.data`, which no version counts."""
        self.teacher = nn.Linear(W, W).requires_grad_(False)

    def change_teacher(self, x: Tensor) -> Tensor:
        self.teacher.weight.data.mul_(0.5).add_(self.body[0].weight.data[:W], alpha=0.5)
        return x + self.teacher(x)

    def change_attribute(self, x: Tensor) -> Tensor:
        """A tensor that is not there before the first forward, then rebound."""
        self.state = x.detach().mean(0) if self.state is None else 0.5 * self.state + 0.5 * x.detach().mean(0)
        return x - self.state

    def make_growing(self) -> None:
        self.state = []

    def change_growing(self, x: Tensor) -> Tensor:
        self.state.append(x.detach().mean(0))
        return x + torch.stack(self.state).sum(0)

    def make_nested(self) -> None:
        self.state = {"seen": deque(maxlen=3), "stats": Stats(0, {})}

    def change_nested(self, x: Tensor) -> Tensor:
        seen, stats = self.state["seen"], self.state["stats"]
        seen.append(float(x.detach().mean()))
        stats.count += 1
        stats.by_name.setdefault("norm", torch.zeros(())).add_(x.detach().norm())
        return x * (1 + sum(seen)) / stats.count + stats.by_name["norm"] / 100

    def make_generator(self) -> None:
        self.state = {"torch": torch.Generator().manual_seed(1), "numpy": np.random.default_rng(2)}

    def change_generator(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.state["torch"])
        return x + noise * float(self.state["numpy"].random())

    def change_random(self, x: Tensor) -> Tensor:
        """Python's and numpy's global generators: layer drop, augmentation."""
        return x * random.random() + float(np.random.rand()) * torch.rand(x.shape)

    def change_drop(self, x: Tensor) -> Tensor:
        """Stochastic depth by Python's generator: what is saved depends on the draw."""
        return x.tanh().sin() if random.random() < 0.5 else x


@dataclass
class Stats:
    count: int
    by_name: dict[str, Tensor]


STATES = [name.removeprefix("change_") for name in vars(Stateful) if name.startswith("change_")]
STATES += ["spectral", "spectral_old"]


def stateful(kind: str) -> nn.Module:
    return Plain(lambda: Stateful(kind))


class Looped(Plain):
    """All blocks twice, with state of their own."""

    def __init__(self, kind: str = "counter") -> None:
        super().__init__(lambda: Stateful(kind))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Recycling(Plain):
    """The blocks run without gradients first."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = super().forward(x)
        return super().forward(x)


class Mode(Enum):
    """Compared by identity, wherever it is kept."""

    plain, scaled = "plain", "scaled"


@dataclass
class Stream:
    x: Tensor
    skips: list[Tensor]
    mode: Mode = Mode.scaled


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = body(), kind

    def forward(self, state: Any, *, extra: Any = None) -> Any:
        if self.kind == "dict":  # written to, and handed on
            state["x"] = self.body(state["x"])
            return state
        if self.kind == "dataclass":
            y = self.body(state.x)
            return Stream(y * 2 if state.mode is Mode.scaled else y, [*state.skips, y])
        if self.kind == "cache":  # grows by each block, as a key/value cache does
            extra.setdefault("seen", []).append(state)
            return self.body(torch.stack(extra["seen"]).mean(0))
        taken = extra.pop()  # "skips": takes from a list
        return self.body(state) + taken


class OddArguments(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Odd(kind) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("dict", "dataclass"):
            state: Any = {"x": x} if self.kind == "dict" else Stream(x, [])
            for layer in self.layers:
                state = layer(state)
            return state["x"] if self.kind == "dict" else state.x + sum(state.skips)
        extra: Any = {} if self.kind == "cache" else [x * i for i in range(5)]
        for layer in self.layers:
            x = layer(x, extra=extra)
        return x


class SparseLookup(nn.Module):
    """Each block has an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(20, W, sparse=True), body()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.table((x.detach().abs().sum(1) % 20).long()))


def sparse() -> nn.Module:
    return Plain(SparseLookup)


class EncoderDecoder(nn.Module):
    """Two lists, registered in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(Crossed() for _ in range(2))})
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(body() for _ in range(3))})

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder["layers"]:
            memory = layer(memory)
        for layer in self.decoder["layers"]:
            x = layer(x, memory)
        return x


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = body(), nn.Linear(W, W)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.body(x) * self.gate(memory).sigmoid()


class Mixture(nn.Module):
    """A block of eight experts, of which each sample takes one; the router keeps a load that it balances by."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(body() for _ in range(8))
        self.router = nn.Linear(W, 8)
        self.register_buffer("load", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x) - self.load
        best = scores.argmax(1)
        with torch.no_grad():
            self.load += F.one_hot(best, 8).sum(0)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (best == index).nonzero()[:, 0]
            out = out.index_add(0, chosen, expert(x[chosen]))
        return out * scores.softmax(1).gather(1, best[:, None])


def mixture() -> nn.Module:
    return Plain(Mixture)


class Tied(Plain):
    """All blocks share their weights' casts under autocast, and so does the head."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer[0].weight = self.layers[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.layers[0][0].weight).narrow(1, 0, W)


class Methods(nn.Module):
    """Calls methods of its blocks, not the blocks."""

    def __init__(self, called: int = 0) -> None:
        super().__init__()
        self.layers, self.called = nn.ModuleList(body() for _ in range(4)), called

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if index < self.called else x + layer[2](layer[1](layer[0](x)))
        return x


class Detached(Plain):
    """Blocks whose result takes no gradient; the head's does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x).detach())


_outside: list[int] = []


class Outside(nn.Module):
    """State outside of all modules. `kind`: what it makes of a recomputation: other tensors, or an error."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(OutsideBlock(kind) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        _outside[:] = [] if self.kind == "more" else [1] * len(self.layers)
        for layer in self.layers:
            x = layer(x)
        return x


class OutsideBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = body(), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "raises":
            return self.body(x * _outside.pop())
        _outside.append(1)
        return self.body(torch.cat([x] * len(_outside))).view(len(_outside), *x.shape).mean(0)
