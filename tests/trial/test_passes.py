"""Which steps a peak is of: the largest batches, evaluation, what grows, what a model builds, what the loop holds."""

from __future__ import annotations

import dataclasses
import math
from collections import UserDict, deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

import sweep.trial.predict
from sweep.config.check import typed
from sweep.config.schema import Config
from sweep.errors import BadInput, DeviceOutOfMemory
from sweep.memory.ledger import Ledger
from sweep.results import MIB, Prediction
from sweep.trial.measure import measure, memory_pass
from sweep.trial.predict import predict
from sweep.workload import build_data, build_workload
from sweep.workload.data import largest_of, map_batch, part_of, samples_in, shapes_of, tensors_of
from sweep.workload.step import Phases, run_step, split

CPU = torch.device("cpu")
ROOT = sweep.trial.predict.__file__.rsplit("/sweep/", 1)[0]
WIDTH, VOCABULARY, BATCH = 16, 64, 4


def config(model: str = "Tokens", *overrides: str, data: str = "Lengths", **data_arguments: Any) -> Config:
    with initialize_config_dir(f"{ROOT}/conf", version_base=None):
        conf = typed(compose("config", ["workload=custom", "measure=quick", "device=cpu", *overrides]))
    w = conf.workload
    w.model, w.data = {"_target_": f"{__name__}.{model}"}, {"_target_": f"{__name__}.{data}", **data_arguments}
    w.loss = {"_target_": f"{__name__}.{'vector_loss' if data == 'Vectors' else 'token_loss'}"}
    w.global_batch_size = BATCH
    conf.measure.verify = False
    return conf


def both(conf: Config) -> Prediction:
    """The prediction, which is what the ledger's pass of a measurement sees."""
    data = build_data(conf.workload)
    predicted, seen = predict(conf, data), memory_pass(conf, CPU, data)
    assert predicted.peak == seen.peak
    assert predicted.allocated_mib == seen.peak_mib
    assert (predicted.largest_step, predicted.shapes_differ) == (seen.largest_step, seen.shapes_differ)
    assert predicted.evaluation_mib == seen.evaluation_mib
    assert predicted.growth_mib_per_step == seen.growth_mib_per_step
    assert predicted.caveats == seen.caveats
    return predicted


def peaks_of_steps(conf: Config, steps: int) -> list[float]:
    """Of each of so many plain optimizer steps, one after the other."""
    w, ledger, peaks, phases = build_workload(conf.workload, CPU), Ledger(), [], Phases()
    batches = [w.train_batch(step) for step in range(steps)]
    with ledger, phases.listening(ledger):
        ledger.track(w.model, w.optimizer)
        for batch in batches:
            ledger.reset_peak()
            run_step(w, batch, phases)
            peaks.append(ledger.log.peak / MIB)
    return peaks


class Lengths:
    """Token batches whose length follows from the step; held-out ones of `held_out` tokens."""

    version = "1"

    def __init__(self, lengths: list[int] = [8], held_out: int = 4) -> None:  # noqa: B006  (never changed)
        self.lengths, self.held_out = lengths, held_out

    def describe(self) -> dict[str, str | int]:
        return {}

    def train_batch(self, step: int, size: int) -> dict[str, Tensor]:
        tokens = torch.arange(size * self.lengths[step % len(self.lengths)]).reshape(size, -1) % VOCABULARY
        return {"inputs": tokens, "targets": tokens.roll(1, dims=1)}

    def eval_batch(self, index: int, size: int) -> dict[str, Tensor]:
        return Lengths([self.held_out]).train_batch(0, size)


class Vectors:
    """Float batches (size, *shape): the one of step i has shapes[i]."""

    version = "1"

    def __init__(self, shapes: list[list[int]] = [[8, WIDTH]]) -> None:  # noqa: B006
        self.shapes = shapes

    def describe(self) -> dict[str, str | int]:
        return {}

    def train_batch(self, step: int, size: int) -> dict[str, Tensor]:
        return {"inputs": torch.ones(size, *self.shapes[step % len(self.shapes)])}

    def eval_batch(self, index: int, size: int) -> dict[str, Tensor]:
        return {"inputs": torch.ones(size, 1, WIDTH)}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["inputs"]).flatten(0, -2), batch["targets"].flatten())


class MatrixModel(nn.Module):
    """(B, S, D) -> attention of S x S, and features of D x D."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        rows, columns = x @ x.transpose(1, 2), x.transpose(1, 2) @ x
        return rows.softmax(-1).square().mean() + columns.softmax(-1).square().mean()


def vector_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["inputs"]).square().mean()


# -- the largest batch -----------------------------------------------------------------------------------------------


def test_the_peak_is_that_of_the_largest_of_the_steps_that_run() -> None:
    conf = config(lengths=[8, 16, 128], held_out=4)
    predicted = both(conf)
    assert predicted.peak is not None
    assert predicted.peak.mib == max(peaks_of_steps(conf, 3)) == peaks_of_steps(conf, 3)[2]
    assert (predicted.largest_step, predicted.shapes_differ) == (2, True)
    assert "step 2" in predicted.caveats[0]
    conf.device.capacity_mib = (predicted.allocated_mib + max(peaks_of_steps(conf, 2))) / 2
    assert not predict(conf).fits
    with pytest.raises(DeviceOutOfMemory):
        measure(conf, CPU, build_data(conf.workload))


def test_steps_that_do_not_run_are_named_and_not_counted() -> None:
    usual, later = both(config(lengths=[8])), both(config(lengths=[8, 8, 8, 8, 64]))
    assert later.allocated_mib == usual.allocated_mib
    assert not usual.caveats
    assert "step 4" in later.caveats[0]
    assert both(config("Tokens", "measure.steps=5", lengths=[8, 8, 8, 8, 64])).largest_step == 4


def test_of_batches_none_of_which_is_the_largest_each_is_tried() -> None:
    shapes = [[4, 4], [4, 96], [128, 4], [3, 90]]
    alone = [predict(config("MatrixModel", data="Vectors", shapes=[shape])).allocated_mib for shape in shapes]
    conf = config("MatrixModel", "measure.steps=3", data="Vectors", shapes=shapes)
    predicted = both(conf)
    assert predicted.largest_step == 2
    assert predicted.allocated_mib == max(alone) == alone[2]


def test_which_batches_are_the_largest() -> None:
    kinds = [shapes_of({"x": torch.empty(2, *shape)}) for shape in [(4, 9), (5, 3), (5, 3), (4, 3), (5, 2), (1, 9)]]
    assert largest_of(kinds) == [0, 1]
    assert largest_of(kinds[:1]) == [0]
    assert largest_of([]) == []


# -- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_that_is_larger_than_training_is_the_peak() -> None:
    conf = config(lengths=[4], held_out=256)
    predicted = both(conf)
    assert predicted.peak_phase == "evaluation"
    assert predicted.evaluation_mib == predicted.allocated_mib
    assert "gradient" in predicted.at_peak_mib
    assert "optimizer_state" in predicted.at_peak_mib
    assert "evaluation" in predicted.caveats[0]
    conf.measure.eval_batches = 0
    training = both(conf)
    assert training.peak_phase != "evaluation"
    assert training.evaluation_mib is None
    conf.measure.eval_batches = 1
    with pytest.raises(DeviceOutOfMemory, match="evaluation"):
        conf.device.capacity_mib = (training.allocated_mib + predicted.allocated_mib) / 2
        measure(conf, CPU, build_data(conf.workload))


# -- what a model keeps ----------------------------------------------------------------------------------------------


class KeepsAll(Tokens):
    """Keeps its last `most` outputs, or all of them."""

    most: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.kept: deque[Tensor] = deque(maxlen=self.most)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        if self.training:
            self.kept.append(logits.detach().clone())
        return logits


class KeepsFour(KeepsAll):
    most = 4


@pytest.mark.parametrize("steps", [2, 20])
def test_a_peak_that_grows_is_that_of_the_last_step_and_named(steps: int) -> None:
    conf = config("KeepsAll", f"measure.steps={steps}")
    predicted = both(conf)
    assert predicted.growth_mib_per_step == BATCH * 8 * VOCABULARY * 4 / MIB
    assert predicted.allocated_mib == pytest.approx(peaks_of_steps(conf, 1 + steps)[-1], rel=1e-12)
    assert "leaves" in predicted.caveats[0]


def test_what_is_kept_up_to_a_number_does_not_grow() -> None:
    conf = config("KeepsFour", "measure.steps=9")
    predicted = both(conf)
    assert predicted.growth_mib_per_step == 0
    assert predicted.allocated_mib == peaks_of_steps(conf, 10)[-1]


class LazyTable(Tokens):
    """Builds a table at its first forward, as a plain attribute in a dict, and one more at its third."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in (1, 7):
            self.cache[f"table {self.calls}"] = torch.zeros(256, 256)
        return super().forward(tokens) + self.cache["table 1"].sum()


@pytest.mark.parametrize("strategy", ["checkpoint", "micro_batch"])
def test_no_prediction_depends_on_those_before_it(strategy: str) -> None:
    alone = both(config("LazyTable", f"strategy={strategy}"))
    for before in ("baseline", "checkpoint", "baseline"):
        predict(config("LazyTable", f"strategy={before}"))
    after = predict(config("LazyTable", f"strategy={strategy}"))
    assert (after.peak, after.flops_per_step) == (alone.peak, alone.flops_per_step)


def test_a_model_that_steps_leave_alone_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    original = sweep.trial.predict.build_workload
    monkeypatch.setattr(sweep.trial.predict, "build_workload", lambda *a: built.append(1) or original(*a))
    sweep.trial.predict._workloads.clear()
    for _ in range(3):
        predict(config("Tokens", lengths=[11]))
    assert len(built) == 1
    for _ in range(3):
        predict(config("LazyTable", lengths=[11]))
    assert len(built) == 4


# -- the outputs that a loop holds -----------------------------------------------------------------------------------


class HoldingLoss:
    """Holds the logits itself."""

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.logits = model(batch["inputs"])
        return F.cross_entropy(self.logits.flatten(0, -2), batch["targets"].flatten())


@pytest.mark.parametrize("micro", ["null", "2"])
def test_outputs_are_held_until_the_step_ends(micro: str) -> None:
    conf = config("Tokens", f"strategy.micro_batch_size={micro}", lengths=[512])
    held = both(conf)
    logits = (BATCH if micro == "null" else 2) * 512 * VOCABULARY * 4 / MIB
    assert held.held_outputs_mib == logits
    conf.workload.hold_outputs = False
    gone = both(conf)
    assert gone.held_outputs_mib == 0
    assert held.allocated_mib - gone.allocated_mib == pytest.approx(logits, abs=2e-3)
    conf.workload.loss = {"_target_": f"{__name__}.HoldingLoss"}
    assert predict(conf).allocated_mib == pytest.approx(held.allocated_mib, abs=1e-2)


def test_outputs_that_go_into_the_graph_are_not_counted_as_held() -> None:
    assert both(config("MatrixModel", data="Vectors")).held_outputs_mib <= 512 / MIB


# -- batches of any nesting ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    one: Tensor
    other: list[Any]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(6, 2), torch.ones(6)),
        [torch.ones(6, 2), {"deep": (torch.ones(6), 3, "all")}],
        UserDict(inputs=torch.ones(6), names=list("abcdef"), scale=torch.ones(())),
        Pair(torch.ones(6), [torch.ones(6, 1), None]),
        torch.ones(6, 3),
    ],
)
def test_a_batch_is_any_nesting_and_is_cut_by_its_samples(batch: Any) -> None:
    assert samples_in(batch) == 6
    parts = list(split(batch, 4))
    assert [samples_in(part) for part in parts] == [4, 2]
    assert all(type(part) is type(batch) for part in parts)
    assert [t.shape[0] for t in tensors_of(parts[1]) if t.dim()] == [2] * len([t for t in tensors_of(batch) if t.dim()])
    doubled = map_batch(lambda t: t * 2, batch)
    assert all(torch.equal(b, 2 * a) for a, b in zip(tensors_of(batch), tensors_of(doubled), strict=True))
    if isinstance(batch, UserDict):
        assert parts[1]["names"] == ["e", "f"]
        assert len(batch["names"]) == 6


def test_parts_keep_what_belongs_to_all_samples() -> None:
    part = part_of((torch.arange(5), torch.tensor(7), "words", [1, 2]), 3, 5)
    assert part[0].tolist() == [3, 4]
    assert part[1:] == (torch.tensor(7), "words", [1, 2])


class Masked:
    """(tokens, {"mask": of ones and zeros, "lengths": of each sample}) in a tuple, as a tokenizer's output."""

    version = "1"

    def describe(self) -> dict[str, str | int]:
        return {}

    def train_batch(self, step: int, size: int) -> tuple[Tensor, Any]:
        lengths = torch.arange(size) % 5 + 2
        mask = (torch.arange(8) < lengths[:, None]).long()
        return torch.ones(size, 8, dtype=torch.int64), UserDict(mask=mask, lengths=lengths)

    eval_batch = train_batch


class ReadsMask(Tokens):
    """Takes another path where all is masked, and cuts to the longest sample: both read values."""

    def forward(self, tokens: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())
        x = super().forward(tokens[:, :longest])
        return x if bool((mask == 1).all()) else x * mask[:, :longest, None].to(x.dtype)


def masked_loss(model: nn.Module, batch: tuple[Tensor, Any]) -> Tensor:
    tokens, rest = batch
    return model(tokens, rest["mask"], rest["lengths"]).square().mean()


@pytest.mark.parametrize("strategy", ["baseline", "micro_batch", "checkpoint"])
def test_masks_and_lengths_in_nested_batches_are_predicted_with_their_values(strategy: str) -> None:
    conf = config("ReadsMask", f"strategy={strategy}", data="Masked")
    conf.workload.loss = {"_target_": f"{__name__}.masked_loss"}
    assert both(conf).allocated_mib > 0
    assert measure(conf, CPU, build_data(conf.workload)).eval_loss is not None


@pytest.mark.parametrize("method", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("wrong", [3, 0])
def test_a_source_that_gives_another_number_of_samples_is_named(
    method: str, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = config()
    right = getattr(Lengths, method)
    monkeypatch.setattr(Lengths, method, lambda self, i, size: right(self, i, wrong) if wrong else {"note": "none"})
    for look in (lambda: predict(conf), lambda: measure(conf, CPU, build_data(conf.workload))):
        with pytest.raises(BadInput, match=f"workload.data=.*Lengths.*{method}"):
            look()


# -- what the ledger cannot look into --------------------------------------------------------------------------------


class CompiledBlocks(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in self.layers)


class CompiledInPlace(Tokens):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="eager")


class Scripted(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(torch.jit.script(layer) for layer in self.layers)


class CompiledFunction(Tokens):
    """Nothing in its modules tells that it is compiled."""

    def forward(self, tokens: Tensor) -> Tensor:
        return _doubled(super().forward(tokens))


_doubled = torch.compile(lambda x: x.sin() * 2, backend="eager")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["CompiledBlocks", "CompiledInPlace", "Scripted", "CompiledFunction"])
def test_a_compiled_model_is_measured_without_its_peak(model: str) -> None:
    m = measure(config(model), CPU, build_data(config(model).workload))
    assert m.step_ms > 0
    assert m.eval_loss is not None
    assert m.peak is None
    assert math.isnan(m.peak_allocated_mib)
    assert len(m.caveats) == 1
    assert "not known" in m.caveats[0]


class Overflows(Tokens):
    """Its gradients overflow in 16 bits at the scale that a gradient scaler starts with."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 50


def test_the_memory_pass_sees_steps_whose_updates_take_effect() -> None:
    conf = config("Overflows", "workload.dtype=amp_fp16")
    predicted = both(conf)
    assert predicted.at_peak_mib["optimizer_state"] > 0
    m = measure(conf, CPU, build_data(conf.workload))
    assert m.peak_allocated_mib == memory_pass(conf, CPU, build_data(conf.workload)).peak_mib
