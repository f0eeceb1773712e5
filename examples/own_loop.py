"""Compare strategies on a model of one's own, then train with the one that fits. Runs on a CPU in a minute.

    python examples/own_loop.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sweep

BATCH = 64


class Mlp(nn.Module):
    def __init__(self, width: int = 256, layers: int = 8) -> None:
        super().__init__()
        inner = 4 * width
        block = lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).mean(1)


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 32, 256, generator=generator)
    return {"inputs": x, "targets": x.sum((1, 2)).long().remainder(10)}


def loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(part["inputs"]), part["targets"])


torch.manual_seed(0)
model = Mlp()
baseline = sweep.predict(model, loss, batch(0), device="cpu").allocated_mib
measure = {"warmup_steps": 1, "steps": 2, "repeats": 1}
found = sweep.compare(model, loss, batch(0), device="cpu", memory_mib=0.5 * baseline, measure=measure)
print(found)
assert found.preferred is not None, "nothing fits into half of the memory"

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with sweep.apply(model, found.preferred) as strategy:
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part, weight in sweep.micro_batches(batch(step), strategy.micro_batch_size):
            with strategy.forward():
                own = loss(model, part)
            (own * weight).backward()
            total += own.item() * weight
        optimizer.step()
        print(f"step {step}: loss {total:.4f}")
    strategy.check()
