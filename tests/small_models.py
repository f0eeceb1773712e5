"""Models of one's own, as a person would bring them: what strategies must cope with beside the built-in workloads.

They are reached through `_target_` like any other, so the tests of isolation import them in another process, too.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NamedBlock(nn.Module):
    """Takes its state by name, and a mask; gives a dict. Dropout inside, so that random state counts."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, *, hidden: Tensor, mask: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        inner = self.dropout(F.gelu(self.up(hidden)))
        return {"hidden": hidden + scale * self.down(inner) * mask, "norm": inner.square().mean(dim=(1, 2))}


class DictModel(nn.Module):
    """Token ids (B, S) -> {"logits": (B, S, V), "norms": [(B,), ...]}; blocks take keywords and give dicts."""

    def __init__(self, vocab_size: int = 32, width: int = 32, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(NamedBlock(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)
        self.register_buffer("mask", torch.ones(width))

    def forward(self, tokens: Tensor) -> dict[str, object]:
        hidden, norms = self.tokens(tokens), []
        for layer in self.layers:
            out = layer(hidden=hidden, mask=self.mask, scale=0.5)
            hidden = out["hidden"]
            norms.append(out["norm"])
        return {"logits": self.head(hidden), "norms": norms}


class TupleBlock(nn.Module):
    """A state of two tensors in a tuple, in and out, as in reversible or two-stream networks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = state
        a = a + F.dropout(torch.tanh(self.left(b)), 0.1, self.training)
        return a, b + torch.tanh(self.right(a))


class TupleModel(nn.Module):
    """Token ids (B, S) -> (logits (B, S, V), state)."""

    def __init__(self, vocab_size: int = 32, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 2 * width)
        self.layers = nn.ModuleList(TupleBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.tokens(tokens).chunk(2, dim=-1)
        state = (a, b)
        for layer in self.layers:
            state = layer(state)
        return self.head(state[0] * state[1]), state[1]


class ComplexModel(nn.Module):
    """Mixes positions in Fourier space: conjugated views and complex tensors are saved for backward."""

    def __init__(self, vocab_size: int = 32, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(FourierBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class FourierBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(width, dtype=torch.complex64) / 4)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(x, dim=1) * self.filter
        power = (z * z.conj()).real / x.shape[1]
        back = torch.fft.ifft(z * z.conj().imag, dim=1).real
        return x + torch.tanh(self.out(power + back))


class TiedBlocks(nn.Module):
    """Blocks that share one weight, and an embedding that is also the output layer, seen as a view."""

    def __init__(self, vocab_size: int = 32, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        layer = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        for layer in self.layers[1:]:
            layer[0].weight = self.layers[0][0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.tokens.weight.t()


class RunningNorm(nn.Module):
    """Normalises by statistics that it keeps itself, by rebinding one buffer and changing another in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=(0, 1))
        return x + torch.tanh(self.linear(x - x.mean(dim=-1, keepdim=True)))


class StatefulModel(nn.Module):
    def __init__(self, vocab_size: int = 32, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(RunningNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)
        self.register_buffer("causal", torch.full((16, 16), float("-inf")).triu(1))  # as many models keep their mask

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        size = x.shape[1]
        weights = (x @ x.transpose(1, 2) / 8 + self.causal[:size, :size]).softmax(-1)
        return self.head(weights @ x)


class Ending(TupleModel):
    """A model whose forward ends its process, or never ends. `how`: exit | kill | sleep."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        print("last words", file=sys.stderr, flush=True)
        if self.how == "exit":
            os._exit(7)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return super().forward(tokens)


class Blockless(nn.Module):
    """Two layers that have nothing in common."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.first(images.flatten(1)).tanh())


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss as people write it: the mean over the batch, no count."""
    return F.mse_loss(model(batch["inputs"]).flatten(1), batch["targets"][:, None].float().expand(-1, 10))


class PlainSgd(torch.optim.SGD):
    """An optimizer of one's own, without weight decay among its arguments."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)  # type: ignore[arg-type]


class ProxyLoss(nn.Module):
    """A loss with class centres to learn, a scale that it learns too, and a buffer: metric learning."""

    def __init__(self, classes: int = 10, width: int = 10, scale: float = 1.0) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(classes, width))
        self.scale = nn.Parameter(torch.tensor(scale))
        self.register_buffer("weights", torch.linspace(1, 2, classes))

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = self.scale * (model(batch["inputs"]) @ self.centres.t())
        return F.cross_entropy(logits, batch["targets"], weight=self.weights)


class HoldingLoss:
    """The same in a class that is no module, beside a bare parameter and a frozen teacher in evaluation mode."""

    def __init__(self) -> None:
        self.parts = {"proxies": ProxyLoss()}
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.teacher = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10)).requires_grad_(False).eval()

    def count(self, batch: dict[str, Tensor]) -> int:
        return len(batch["targets"])

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert not self.teacher.training
        distilled = F.mse_loss(model(batch["inputs"]), self.teacher(batch["inputs"]))
        return (self.parts["proxies"](model, batch) * self.temperature + distilled) * self.count(batch)


class UnreachableLoss:
    """Holds what takes gradients and is no parameter."""

    def __init__(self) -> None:
        self.temperature = torch.tensor(0.5, requires_grad=True)

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["inputs"]).mean() * self.temperature


_shared_proxies = ProxyLoss()


def loss_with_global(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return _shared_proxies(model, batch)


class AsksForTheDevice(nn.Module):
    """Takes a fused path where it is on CUDA. `asks`: how it finds out; "yes" and "no": without asking."""

    scale: Tensor

    def __init__(self, asks: str, width: int = 16) -> None:
        super().__init__()
        self.asks = asks
        self.found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.register_buffer("scale", torch.ones(width, device=self.found))
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.head = nn.Linear(width, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)[:, None]
        fused = {
            "is_cuda": lambda: x.is_cuda,
            "type": lambda: x.device.type == "cuda",
            "available": torch.cuda.is_available,
            "weight": lambda: str(self.head.weight.device).startswith("cuda"),
            "synchronize": lambda: torch.cuda.synchronize() is None,
            "at first": lambda: self.found.type == "cuda" and torch.zeros(1, device=self.found).is_cuda,
            "yes": lambda: True,
            "no": lambda: False,
        }[self.asks]()
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            a = F.scaled_dot_product_attention(q, k, v) if fused else (q @ k.mT).softmax(-1) @ v
            x = x + a * self.scale
        return self.head(x[:, 0])
