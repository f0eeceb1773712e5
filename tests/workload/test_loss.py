"""The summed loss: its value, its count, ignored targets, and the shapes and outputs that it takes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from sweep.workload.loss import IGNORED, CrossEntropy, logits_of


class Fixed(nn.Module):
    """Gives the same output whatever its input."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, inputs: Tensor) -> Any:
        return self.output


def example(*shape: int, classes: int = 7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    logits = torch.randn(*shape, classes, dtype=dtype, requires_grad=True)
    return logits, {"inputs": torch.zeros(*shape), "targets": torch.randint(classes, shape)}


@pytest.mark.parametrize("shape", [(5,), (3, 4)])
def test_is_the_sum_over_targets(shape: tuple[int, ...]) -> None:
    logits, batch = example(*shape)
    probabilities = logits.softmax(-1).reshape(-1, 7)
    expected = -sum(row[t].log() for row, t in zip(probabilities, batch["targets"].flatten().tolist(), strict=True))
    loss = CrossEntropy()(Fixed(logits), batch)
    assert loss.dim() == 0
    torch.testing.assert_close(loss, expected)
    assert CrossEntropy().count(batch) == batch["targets"].numel()


def test_ignored_targets_count_for_nothing() -> None:
    logits, batch = example(3, 4)
    batch["targets"][0, 1:] = IGNORED
    batch["targets"][2] = IGNORED
    loss = CrossEntropy()(Fixed(logits), batch)
    kept = batch["targets"] != -100
    torch.testing.assert_close(loss, F.cross_entropy(logits[kept], batch["targets"][kept], reduction="sum"))
    assert CrossEntropy().count(batch) == 5
    loss.backward()
    assert logits.grad is not None
    assert (logits.grad[~kept] == 0).all()
    assert (logits.grad[kept] != 0).all()


def test_a_batch_without_targets_gives_zero_and_zero_gradients() -> None:
    logits, batch = example(3, 4)
    batch["targets"].fill_(IGNORED)
    loss = CrossEntropy()(Fixed(logits), batch)
    loss.backward()
    assert loss.item() == 0
    assert CrossEntropy().count(batch) == 0
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0


def test_micro_batches_of_unequal_targets_add_up_to_the_whole() -> None:
    logits, batch = example(6, 4)
    batch["targets"][0] = IGNORED
    batch["targets"][1, 1:] = IGNORED
    loss = CrossEntropy()
    (loss(Fixed(logits), batch) / loss.count(batch)).backward()
    assert logits.grad is not None
    whole, logits.grad = logits.grad.clone(), None
    window = loss.count(batch)
    for part in (slice(0, 1), slice(1, 3), slice(3, 6)):
        micro = {name: tensor[part] for name, tensor in batch.items()}
        (loss(Fixed(logits[part]), micro) / window).backward()
    torch.testing.assert_close(logits.grad, whole)


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits, batch = example(64, 64, dtype=torch.bfloat16)
    loss = CrossEntropy()(Fixed(logits), batch)
    assert loss.dtype is torch.float32
    expected = F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(CrossEntropy()(Fixed(logits), batch), expected, rtol=1e-6, atol=0)


class Named(NamedTuple):
    hidden: Tensor
    logits: Tensor


@dataclasses.dataclass
class Output:
    logits: Tensor


def test_finds_the_logits_in_every_kind_of_output() -> None:
    logits, batch = example(3, 4)
    other = torch.zeros(1)
    expected = CrossEntropy()(Fixed(logits), batch)
    outputs = [(logits, other), [logits], {"hidden": other, "logits": logits}, Output(logits), Named(other, logits)]
    for output in outputs:
        assert logits_of(output) is logits
        assert torch.equal(CrossEntropy()(Fixed(output), batch), expected)


@pytest.mark.parametrize("output", [None, (), {"loss": torch.zeros(())}, ("logits",), {"logits": None}])
def test_an_output_without_logits_is_named(output: Any) -> None:
    with pytest.raises(TypeError, match=f"output of type {type(output).__name__} holds no logits"):
        logits_of(output)


@pytest.mark.parametrize(("logits", "targets"), [((3, 7), (3, 4)), ((3, 7, 4), (3, 4)), ((7,), ()), ((4, 7), (3,))])
def test_shapes_that_do_not_match_are_named(logits: tuple[int, ...], targets: tuple[int, ...]) -> None:
    batch = {"inputs": torch.zeros(3), "targets": torch.zeros(targets, dtype=torch.int64)}
    with pytest.raises(ValueError, match="do not match targets of shape"):
        CrossEntropy()(Fixed(torch.zeros(logits)), batch)


def test_reads_no_values() -> None:
    with FakeTensorMode():
        logits, batch = example(3, 4)
        loss = CrossEntropy()(Fixed(logits), batch)
        loss.backward()
        assert loss.shape == ()
        assert logits.grad is not None
        assert logits.grad.shape == (3, 4, 7)
