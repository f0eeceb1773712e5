"""One optimizer step over micro-batches: the gradient is the whole batch's, whatever the window looks like."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from small_workloads import config, data_of
from torch import Tensor, nn

from sweep.results import Phase
from sweep.workload import Batch, Workload, build_workload
from sweep.workload.step import Phases, StepResult, run_step, split

CPU = torch.device("cpu")
IGNORED = -100


def workload(**overrides: object) -> Workload:
    """A transformer without dropout, plain SGD: its gradients can be computed by the definition."""
    base: dict[str, object] = {
        "model": {
            "_target_": "sweep.workload.models.Transformer", "vocab_size": 32, "max_seq_len": 16, "layers": 2,
            "d_model": 32, "heads": 2,
        },
        "data": {"_target_": "sweep.workload.data.RandomTokens", "vocab_size": 32, "seq_len": 16},
        "optimizer": {"name": "sgd", "lr": 0.5},
    }  # fmt: skip
    conf = config(base | overrides).workload
    return build_workload(conf, CPU, data_of(conf))


def window(w: Workload, ignore: Callable[[Tensor], None]) -> Batch:
    batch = {n: t.clone() for n, t in w.train_batch(0).items()}
    ignore(batch["targets"])
    return batch


def reference(w: Workload, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by the definition: the mean over the targets of the window, in one piece and in double."""
    model = w.model.double()
    logits = model(batch["inputs"])
    keep = batch["targets"] != IGNORED
    loss = nn.functional.cross_entropy(logits[keep], batch["targets"][keep], reduction="mean")
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), {n: g.float() for (n, _), g in zip(model.named_parameters(), grads, strict=True)}


def unequal(targets: Tensor) -> None:
    for sample in range(len(targets)):
        targets[sample, : 2 * sample] = IGNORED


def one_micro_batch_ignored(targets: Tensor) -> None:
    targets[2:4] = IGNORED


def one_target_left(targets: Tensor) -> None:
    last = targets[-1, -1].item()
    targets.fill_(IGNORED)
    targets[-1, -1] = last


WINDOWS = [unequal, one_micro_batch_ignored, one_target_left, lambda targets: None]


@pytest.mark.parametrize("ignore", WINDOWS, ids=["unequal", "ignored micro-batch", "one target", "full"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, None])
def test_gradients_are_those_of_the_undivided_window(ignore: Callable[[Tensor], None], size: int | None) -> None:
    w = workload()
    batch = window(w, ignore)
    result = run_step(w, batch, Phases(), micro_batch_size=size)
    expected_loss, expected = reference(workload(), batch)
    assert result.loss.item() == pytest.approx(expected_loss, rel=1e-5)
    assert result.targets == int((batch["targets"] != IGNORED).sum())
    assert result.micro_steps == -(-8 // (size or 8))
    for name, parameter in w.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_mean_of_means_would_be_another_gradient() -> None:
    """The windows above tell the two apart: averaging micro-batches' own means is visibly wrong on them."""
    w = workload()
    batch = window(w, unequal)
    means = [w.loss(w.model, part).item() / w.loss.count(part) for part in split(batch, 2)]
    assert sum(means) / len(means) != pytest.approx(reference(workload(), batch)[0], rel=1e-5)


def test_a_window_without_targets_changes_nothing_and_is_no_nan() -> None:
    w = workload()
    before = [p.clone() for p in w.model.parameters()]
    result = run_step(w, window(w, lambda targets: targets.fill_(IGNORED)), Phases(), micro_batch_size=3)
    assert result.loss.item() == 0.0
    assert result.targets == 0
    assert all(p.grad is not None and not p.grad.any() for p in w.model.parameters())
    assert all(map(torch.equal, before, w.model.parameters()))


def test_a_short_last_window_is_divided_by_its_own_targets() -> None:
    w = workload()
    batch = {n: t[:3] for n, t in w.train_batch(0).items()}
    result = run_step(w, batch, Phases(), micro_batch_size=2)
    assert (result.targets, result.micro_steps) == (3 * 16, 2)
    assert result.loss.item() == pytest.approx(reference(workload(), batch)[0], rel=1e-5)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_one_optimizer_step_and_one_scheduler_step_per_global_batch(size: int) -> None:
    w = workload(scheduler={"name": "linear", "warmup_steps": 2, "total_steps": 4})
    updates = []
    w.optimizer.register_step_post_hook(lambda *_: updates.append(w.optimizer.param_groups[0]["lr"]))
    assert w.scheduler is not None
    for step in range(4):
        assert run_step(w, w.train_batch(step), Phases(), micro_batch_size=size).updates == 1
    assert w.scheduler.last_epoch == 4
    assert updates == pytest.approx([0.25, 0.5, 0.5, 0.25])


def test_gradients_do_not_pile_up_from_step_to_step() -> None:
    w, fresh = workload(optimizer={"name": "sgd", "lr": 1e-30}), workload()
    run_step(w, w.train_batch(0), Phases())
    run_step(w, w.train_batch(1), Phases())
    _, expected = reference(fresh, fresh.train_batch(1))
    for name, parameter in w.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [2, None])
def test_clips_the_norm_of_the_whole_windows_gradient(size: int | None) -> None:
    w = workload(grad_clip_norm=0.01)
    run_step(w, w.train_batch(0), Phases(), micro_batch_size=size)
    total = torch.stack([p.grad.norm() for p in w.model.parameters() if p.grad is not None]).norm()
    assert total.item() == pytest.approx(0.01, rel=1e-3)
    _, expected = reference(workload(), w.train_batch(0))
    name, parameter = next(iter(w.model.named_parameters()))
    assert parameter.grad is not None
    cosine = nn.functional.cosine_similarity(parameter.grad.flatten(), expected[name].flatten(), dim=0)
    assert cosine.item() == pytest.approx(1.0, abs=1e-5)


def fp16(scale: float, **overrides: object) -> Workload:
    w = workload(dtype="amp_fp16", scheduler={"name": "linear", "total_steps": 4}, **overrides)
    w.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return w


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_scaler_that_skips_reports_no_update_and_moves_neither_weights_nor_scheduler(clip: float | None) -> None:
    w = fp16(2.0**40, grad_clip_norm=clip)  # overflows fp16
    before = [p.clone() for p in w.model.parameters()]
    result = run_step(w, w.train_batch(0), Phases(), micro_batch_size=4)
    assert result.updates == 0
    assert torch.isfinite(result.loss)
    assert all(map(torch.equal, before, w.model.parameters()))
    assert w.scheduler is not None
    assert w.scheduler.last_epoch == 0
    assert w.scaler is not None
    assert w.scaler.get_scale() == 2.0**39


@pytest.mark.parametrize("clip", [None, 1e6])
def test_a_scaler_that_does_not_skip_updates_by_the_unscaled_gradient(clip: float | None) -> None:
    w, plain = fp16(256.0, grad_clip_norm=clip), workload()
    assert run_step(w, w.train_batch(0), Phases(), micro_batch_size=4).updates == 1
    run_step(plain, plain.train_batch(0), Phases())
    assert w.scheduler is not None
    assert w.scheduler.last_epoch == 1
    start = dict(workload().model.named_parameters())
    moved = torch.cat([(p - start[n]).flatten() for n, p in w.model.named_parameters()])
    expected = torch.cat([(p - start[n]).flatten() for n, p in plain.model.named_parameters()])
    assert ((moved - expected).norm() / expected.norm()).item() < 1e-2


def test_clipping_with_a_scaler_clips_unscaled_gradients() -> None:
    w = fp16(1024.0, grad_clip_norm=0.01)
    run_step(w, w.train_batch(0), Phases(), micro_batch_size=4)
    total = torch.stack([p.grad.norm() for p in w.model.parameters() if p.grad is not None]).norm()
    assert total.item() == pytest.approx(0.01, rel=1e-2)


def test_the_window_can_be_cut_short_without_changing_the_divisor() -> None:
    w = workload()
    result = run_step(w, w.train_batch(0), Phases(), micro_batch_size=2, max_micro_steps=2)
    assert (result.micro_steps, result.targets) == (2, 8 * 16)


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2]), (4, [4, 1]), (5, [5]), (9, [5]), (None, [5])]
)
def test_split(size: int | None, expected: list[int]) -> None:
    batch = {"inputs": torch.arange(10).view(5, 2), "targets": torch.arange(5), "weights": torch.rand(5, 1, 3)}
    parts = list(split(batch, size))
    assert [len(p["targets"]) for p in parts] == expected
    for name, tensor in batch.items():
        assert torch.equal(torch.cat([p[name] for p in parts]), tensor)


class Diary:
    def __init__(self) -> None:
        self.entries: list[str] = []

    def enter_phase(self, phase: str) -> None:
        self.entries.append(f"+{phase}")

    def leave_phase(self, phase: str) -> None:
        self.entries.append(f"-{phase}")


def run_with_diary(w: Workload, size: int) -> tuple[StepResult, list[str]]:
    phases, diary = Phases(), Diary()
    with phases.listening(diary):
        result = run_step(w, w.train_batch(0), phases, micro_batch_size=size)
    assert phases.stack == []
    return result, diary.entries


def test_a_step_goes_through_its_phases_in_order() -> None:
    once = ["+data", "-data", "+forward", "-forward", "+backward", "-backward"]
    assert run_with_diary(workload(), 3)[1] == once * 3 + ["+optimizer", "-optimizer"]


def fail_inside(phases: Phases) -> None:
    with phases(Phase.backward), phases(Phase.recompute):
        assert phases.stack == [Phase.backward, Phase.recompute]
        raise ValueError


def test_phases_nest_tell_all_listeners_and_unwind_after_an_error() -> None:
    phases, first, second = Phases(), Diary(), Diary()
    with phases.listening(first):
        with phases.listening(second), pytest.raises(ValueError):
            fail_inside(phases)
        assert phases.stack == []
        with phases(Phase.data):
            pass
    with phases(Phase.optimizer):
        pass
    nested = ["+backward", "+recompute", "-recompute", "-backward"]
    assert second.entries == nested
    assert first.entries == [*nested, "+data", "-data"]


def test_a_phase_may_be_entered_from_another_thread() -> None:
    """As autograd's device threads do while the caller waits in backward."""
    phases, diary = Phases(), Diary()

    def recompute() -> None:
        with phases(Phase.recompute):
            assert phases.stack == [Phase.backward, Phase.recompute]

    with phases.listening(diary), phases(Phase.backward):
        thread = threading.Thread(target=recompute)
        thread.start()
        thread.join()
        assert phases.stack == [Phase.backward]
    assert diary.entries == ["+backward", "+recompute", "-recompute", "-backward"]


@pytest.mark.parametrize("hold", [True, False])
def test_no_graph_outlives_its_micro_batch(hold: bool) -> None:
    """The next micro-batch's forward must not find the last one's activations in memory, but for held logits."""
    w, alive, seen, inside = workload(hold_outputs=hold), [], [], []

    def look_inside(_: nn.Module, __: object, output: Tensor) -> None:
        assert not any(reference() is not None for reference in inside)
        inside.append(weakref.ref(output.untyped_storage()))

    def look(_: nn.Module, __: object, output: Tensor) -> None:
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(output.untyped_storage()))

    w.model.register_forward_hook(look)
    w.blocks[0].module.register_forward_hook(look_inside)
    run_step(w, w.train_batch(0), Phases(), micro_batch_size=2)
    assert alive == [0, *(3 * [int(hold)])]
    assert len(inside) == 4
