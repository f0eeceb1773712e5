"""Prediction against the ledger's own measurement, against hand-computed cases, and where it must refuse."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sweep.trial.predict
from sweep.config.check import typed
from sweep.config.schema import Config
from sweep.errors import BadInput, CannotPredict
from sweep.memory.ledger import Ledger
from sweep.results import MIB, Peak
from sweep.strategy import applied
from sweep.trial.measure import measure, memory_pass
from sweep.trial.predict import predict
from sweep.workload import Batch, DataSource, build_data, build_workload
from sweep.workload.step import Phases, run_step

CPU = torch.device("cpu")
STRATEGIES = ["baseline", "micro_batch", "checkpoint", "checkpoint_selective", "offload", "hybrid"]
ROOT = sweep.trial.predict.__file__.rsplit("/sweep/", 1)[0]


def config(*overrides: str) -> Config:
    with initialize_config_dir(f"{ROOT}/conf", version_base=None):
        return typed(compose("config", overrides=["measure.eval_batches=0", *overrides]))


def size(numbers: int, bytes_each: int = 4) -> int:
    return -(-numbers * bytes_each // 512) * 512


def measured(conf: Config, data: DataSource) -> tuple[Peak, float, float]:
    """The ledger's peak in the second of two real steps, and the MiB that it moved to the host and back."""
    phases, workload = Phases(), build_workload(conf.workload, CPU, data)
    batches = [workload.train_batch(step) for step in range(2)]
    ledger = Ledger()
    with (
        applied(
            conf.strategy, workload.model, workload.blocks, conf.workload.global_batch_size, phases, CPU
        ) as strategy,
        ledger,
        phases.listening(ledger),
    ):
        ledger.track(workload.model, workload.optimizer)
        for batch in batches:
            ledger.reset_peak()
            strategy.moved.reset()
            run_step(
                workload,
                batch,
                phases,
                micro_batch_size=strategy.micro_batch_size,
                around_forward=strategy.around_forward,
            )
    return ledger.peak(), strategy.moved.to_host_bytes / MIB, strategy.moved.from_host_bytes / MIB


@pytest.fixture(scope="module")
def text() -> DataSource:
    return build_data(config("workload=gpt_tiny", "workload.seq_len=32").workload)


# -- equal to the measurement ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("workload", "dtype"),
    [
        ("gpt_tiny", "fp32"),
        ("gpt_tiny", "amp_bf16"),
        ("vit_digits", "fp32"),
        ("vit_digits", "bf16"),
        ("convnet_digits", "fp32"),
        ("convnet_digits", "amp_bf16"),
    ],
)
def test_equals_the_ledgers_measurement_to_the_byte(workload: str, dtype: str, strategy: str) -> None:
    overrides = [f"workload={workload}", f"workload.dtype={dtype}", "workload.global_batch_size=4", "device=cpu"]
    if workload == "gpt_tiny":
        overrides.append("workload.seq_len=32")
    conf = config(*overrides, f"strategy={strategy}", "strategy.micro_batch_size=null")
    conf.strategy.micro_batch_size = 2 if strategy == "micro_batch" else None
    conf.strategy.offload.min_tensor_kib = 1
    data = build_data(conf.workload)
    prediction = predict(conf, data)
    peak, to_host, from_host = measured(conf, data)
    assert prediction.peak == peak
    assert prediction.allocated_mib == prediction.reserved_mib == peak.mib
    assert (prediction.to_host_mib, prediction.from_host_mib) == (to_host, from_host)
    assert (to_host > 0) == (strategy in ("offload", "hybrid"))


def test_equals_what_a_trial_on_a_cpu_reports(text: DataSource) -> None:
    conf = config(
        "workload=gpt_tiny", "workload.seq_len=32", "workload.global_batch_size=2", "device=cpu", "strategy=hybrid"
    )
    conf.strategy.offload.min_tensor_kib = 1
    assert predict(conf, text).peak == memory_pass(conf, CPU, text).peak


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_optimizers_equal_the_measurement(implementation: str, clip: float | None, text: DataSource) -> None:
    conf = config(
        "workload=gpt_tiny",
        "workload.seq_len=32",
        "workload.global_batch_size=1",
        "device=cpu",
        f"workload.optimizer.implementation={implementation}",
        f"workload.grad_clip_norm={clip or 'null'}",
    )
    assert predict(conf, text).peak == measured(conf, text)[0]


def test_two_micro_steps_stand_for_any_accumulation(text: DataSource) -> None:
    conf = config(
        "workload=gpt_tiny",
        "workload.seq_len=32",
        "workload.global_batch_size=16",
        "device=cpu",
        "strategy=offload",
        "strategy.micro_batch_size=2",
        "strategy.offload.min_tensor_kib=1",
    )
    prediction = predict(conf, text)
    peak, to_host, _ = measured(conf, text)  # eight micro-steps
    assert prediction.allocated_mib == peak.mib and prediction.at_peak_mib == peak.at_peak_mib
    assert prediction.to_host_mib == pytest.approx(to_host)


def test_gradient_scaler_is_predicted_too(text: DataSource) -> None:
    conf = config(
        "workload=gpt_tiny",
        "workload.seq_len=32",
        "workload.global_batch_size=2",
        "device=cpu",
        "workload.dtype=amp_fp16",
    )
    assert predict(conf, text).peak == measured(conf, text)[0]


# -- by hand --------------------------------------------------------------------------------------------------------


class Vectors:
    """Random vectors and one class each."""

    version = "test"

    def __init__(self, width: int = 64) -> None:
        self.width = width

    def describe(self) -> dict[str, str | int]:
        return {}

    def train_batch(self, step: int, size: int) -> Batch:
        return {"inputs": torch.ones(size, self.width), "targets": torch.zeros(size, dtype=torch.long)}

    eval_batch = train_batch


class Tokens(Vectors):
    def train_batch(self, step: int, size: int) -> Batch:
        ids = torch.zeros(size, self.width, dtype=torch.long)
        return {"inputs": ids, "targets": ids}


class Stack(nn.Module):
    """Two Linear layers without bias and a ReLU between them."""

    def __init__(self, width: int = 64, hidden: int = 512, classes: int = 32) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def of_model(target: str, data: str = "Vectors", *overrides: str) -> Config:
    conf = config("workload=gpt_tiny", "device=cpu", "workload.global_batch_size=16", *overrides)
    conf.workload.model = {"_target_": f"{__name__}.{target}"}
    conf.workload.data = {"_target_": f"{__name__}.{data}"}
    conf.workload.optimizer.implementation = type(conf.workload.optimizer.implementation).fused
    conf.workload.grad_clip_norm = None
    return conf


def test_phase_and_category_by_hand() -> None:
    """Peak of the second step, where the last layer's gradients meet the first layer's weight gradient.

    Weights 64 x 512 and 512 x 32; 16 samples. In backward, relu's result is freed by its own node, which makes the
    gradient at the hidden layer; the first layer then makes its weight gradient while x, that gradient and the second
    layer's weight gradient are there. The loss and the sum of losses divided by the targets are there, too.
    """
    prediction = predict(of_model("Stack"))
    weights = size(64 * 512) + size(512 * 32)
    counters = 2 * 512
    assert (prediction.peak_phase, prediction.peak_operator) == ("backward", "aten.mm")
    assert prediction.peak is not None and prediction.peak.module == "one"
    at_peak = {k: round(v * MIB) for k, v in prediction.at_peak_mib.items()}
    assert at_peak["parameter"] == weights
    assert at_peak["optimizer_state"] == 2 * weights + counters
    assert at_peak["gradient"] == weights
    assert at_peak["input"] == size(16 * 64) + size(16, 8)
    hidden_gradient = size(16 * 512)
    assert at_peak["temporary"] - hidden_gradient in (0, 512, 1024)  # and the gradient of the loss
    held = size(16 * 32)
    assert prediction.held_outputs_mib == held / MIB
    assert at_peak["activation"] <= held + 3 * 512  # what is left of forward: the outputs, which are held, and the loss


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def test_tied_weights_count_once() -> None:
    conf = of_model("TiedModel", "Tokens")
    prediction = predict(conf)
    at_peak = {k: round(v * MIB) for k, v in prediction.at_peak_mib.items()}
    assert at_peak["parameter"] == size(500 * 64)
    assert at_peak["optimizer_state"] == 2 * size(500 * 64) + 512
    assert prediction.peak == measured(conf, Tokens())[0]


def test_recomputed_flops_are_those_of_the_recomputed_blocks(text: DataSource) -> None:
    """Against torch's own counter on real steps."""
    conf = config("workload=gpt_tiny", "workload.seq_len=32", "workload.global_batch_size=2", "device=cpu")
    total = {}
    for strategy in ("baseline", "checkpoint"):
        conf = config(
            "workload=gpt_tiny",
            "workload.seq_len=32",
            "workload.global_batch_size=2",
            "device=cpu",
            f"strategy={strategy}",
        )
        phases, workload = Phases(), build_workload(conf.workload, CPU, text)
        with (
            applied(conf.strategy, workload.model, workload.blocks, 2, phases, CPU) as in_force,
            FlopCounterMode(display=False) as counter,
        ):
            run_step(workload, workload.train_batch(0), phases, around_forward=in_force.around_forward)
        total[strategy] = counter.get_total_flops()
        prediction = predict(conf, text)
        assert prediction.flops_per_step == total[strategy]
    assert prediction.recompute_flops_ratio == pytest.approx(total["checkpoint"] / total["baseline"] - 1)


# -- devices --------------------------------------------------------------------------------------------------------


def test_capacity_of_a_cpu_device(text: DataSource) -> None:
    conf = config("workload=gpt_tiny", "workload.seq_len=32", "workload.global_batch_size=2", "device=cpu")
    peak = predict(conf, text).allocated_mib
    conf.device.capacity_mib = peak
    assert predict(conf, text).fits and predict(conf, text).headroom_mib == 0
    conf.device.capacity_mib = peak - 1
    prediction = predict(conf, text)
    assert not prediction.fits and prediction.headroom_mib == -1


def test_capacity_and_context_of_an_emulated_card(text: DataSource) -> None:
    conf = config("workload=gpt_tiny", "workload.seq_len=32", "workload.global_batch_size=2", "device=rtx_4090")
    prediction = predict(conf, text)
    assert prediction.fits and prediction.context_mib == conf.device.context_mib
    assert prediction.headroom_mib == pytest.approx(
        conf.device.capacity_mib - conf.device.context_mib - prediction.reserved_mib, abs=1e-3
    )
    assert prediction.reserved_mib >= prediction.allocated_mib
    conf.device.capacity_mib = conf.device.context_mib + prediction.allocated_mib - 1
    short = predict(conf, text)
    assert not short.fits and short.headroom_mib < 0
    assert short.allocated_mib == prediction.allocated_mib


def test_transfer_times_follow_from_the_link(text: DataSource) -> None:
    conf = config(
        "workload=gpt_tiny",
        "workload.seq_len=32",
        "workload.global_batch_size=2",
        "device=rtx_4090",
        "strategy=offload",
        "strategy.offload.min_tensor_kib=1",
        "device.link_bandwidth_gb_s=10",
    )
    prediction = predict(conf, text)
    one_way = prediction.to_host_mib * MIB / 10e9 * 1e3
    assert one_way > 0 and prediction.transfer_round_trip_ms == pytest.approx(2 * one_way)


def test_seventy_billion_parameters_in_two_gib_of_host_memory() -> None:
    """In a process of its own, whose highest resident size is asked of the system."""
    script = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from test_predict import config
from sweep.trial.predict import predict
conf = config("workload=llama_1b", "device=h200", "workload.global_batch_size=1", "workload.model.d_model=8192",
    "workload.model.layers=80", "workload.model.heads=64", "workload.model.d_ff=28672", "workload.model.tied=false")
prediction = predict(conf)
print(prediction.at_peak_mib["parameter"], prediction.fits, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    parameters_mib, fits, kib = out.split()[-3:]
    assert 70e9 * 2 / MIB < float(parameters_mib) < 71e9 * 2 / MIB
    assert fits == "False" and int(kib) < 2 * 2**20


def test_a_sweep_builds_the_model_once(text: DataSource, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = sweep.trial.predict.build_workload
    monkeypatch.setattr(sweep.trial.predict, "build_workload", lambda *a: built.append(1) or original(*a))
    peaks = []
    for micro in (1, 2, 4):
        conf = config(
            "workload=gpt_tiny",
            "workload.seq_len=32",
            "workload.global_batch_size=8",
            "device=cpu",
            "workload.seed=1234",
            f"strategy.micro_batch_size={micro}",
        )
        peaks.append(predict(conf, text).allocated_mib)
    assert len(built) == 1 and peaks == sorted(set(peaks))
    conf.strategy.micro_batch_size = 1
    assert predict(conf, text).allocated_mib == peaks[0], "earlier predictions leave nothing behind"


# -- refusals -------------------------------------------------------------------------------------------------------


class ReadsValues(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


class BranchesOnValues(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if (x > 0).any() else x)


class ShapeFromValues(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > 0])


class ToPython(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tensor(x.tolist()))


class ToNumpy(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.from_numpy(x.numpy()))


class Compiled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.compile(self.one)  # type: ignore[assignment]


class SparseGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x)


@torch.library.custom_op("sweep_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


class CustomOperator(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(doubled(x))


@pytest.mark.parametrize(
    ("target", "data", "cause"),
    [
        ("ReadsValues", "Vectors", "aten._local_scalar_dense"),
        ("BranchesOnValues", "Vectors", "reads a value"),
        ("ShapeFromValues", "Vectors", "aten.nonzero|aten.index"),
        ("ToPython", "Vectors", "tolist"),
        ("ToNumpy", "Vectors", "numpy"),
        ("Compiled", "Vectors", "one is compiled"),
        ("SparseGradients", "Tokens", "sparse"),
        ("CustomOperator", "Vectors", "sweep_test.doubled is a custom operator"),
    ],
)
def test_what_cannot_be_predicted_says_so_by_name(target: str, data: str, cause: str) -> None:
    with pytest.raises(CannotPredict, match=cause):
        predict(of_model(target, data))


class ReadsKnownValues(Stack):
    """What many models do: position numbers are checked, layer-wise rates are read from a linspace."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        if (positions.diff() != 1).any():
            raise AssertionError("positions have gaps")
        assert self.rates[2] == 0.5
        return super().forward(x)


def test_values_that_follow_from_shapes_can_be_read() -> None:
    conf = of_model("ReadsKnownValues")
    assert predict(conf).peak == measured(conf, Vectors())[0]


class Gated(Stack):
    """Frozen blocks of GRUs with a norm: gates are parts that share one memory, and frozen weights are guarded."""

    def __init__(self) -> None:
        super().__init__(hidden=16)
        self.layers = nn.ModuleList(nn.GRU(16, 16) for _ in range(2))
        for layer in self.layers:
            layer.norm = nn.LayerNorm(16).requires_grad_(False)  # of few numbers, which prediction knows
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.two(x)


@pytest.mark.parametrize("strategy", ["baseline", "checkpoint", "checkpoint_selective"])
def test_gates_and_frozen_weights_are_predicted(strategy: str) -> None:
    conf = of_model("Gated", "Vectors", f"strategy={strategy}")
    assert predict(conf).peak == measured(conf, Vectors())[0]


def penalty_loss(model: nn.Module, batch: Batch) -> Tensor:
    """On the gradient at the input, as in a WGAN: there is none to take under no_grad, where held-out data are."""
    x = batch["inputs"].clone().requires_grad_()
    score = torch.tanh(model(x)).mean(-1)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + (slope.norm(dim=-1) - 1).square().mean()


@pytest.mark.parametrize("strategy", ["baseline", "micro_batch"])
def test_a_loss_that_takes_gradients_is_evaluated_too(strategy: str) -> None:
    conf = of_model("Stack", "Vectors", f"strategy={strategy}", "measure=quick", "measure.eval_batches=1")
    conf.workload.loss = {"_target_": f"{__name__}.penalty_loss"}
    assert predict(conf).allocated_mib == pytest.approx(memory_pass(conf, CPU, Vectors()).peak_mib, rel=1e-4)
    found = measure(conf, CPU, Vectors())
    assert found.eval_loss is not None and found.eval_loss_before is not None
    assert found.eval_loss < found.eval_loss_before


def test_a_refused_model_leaves_nothing_behind(text: DataSource) -> None:
    with pytest.raises(CannotPredict):
        predict(of_model("ReadsValues"))
    model = nn.Linear(4, 4)
    loss = F.dropout(model(torch.ones(2, 4)), 0.5).sum()
    loss.backward()
    assert model.weight.grad is not None and torch.isfinite(loss)


def test_the_allocators_settings_come_from_the_device() -> None:
    """Segments of fixed size count the rests that they do not split as allocated; expandable ones have none."""
    conf = config("workload=gpt2_124m", "device=rtx_4090", "workload.global_batch_size=2")
    plain = predict(conf)
    conf.device.alloc_conf = "expandable_segments:True"
    expandable = predict(conf)
    assert expandable.allocated_mib < plain.allocated_mib
    assert expandable.reserved_mib != plain.reserved_mib
    conf.device.alloc_conf = "no_such_option:1"
    with pytest.raises(BadInput, match="device.alloc_conf"):
        predict(conf)


def test_a_torch_without_the_key_falls_back_to_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up old torch: operators are still seen, and the peak differs by gradients that are added up at most."""
    import sweep.memory.operators as intercept

    conf = config("workload=gpt_tiny", "device=cpu", "workload.global_batch_size=2")
    usual = predict(conf, emulations="cpu").allocated_mib
    monkeypatch.setattr(intercept, "_FAKE", None)
    assert predict(conf, emulations="cpu").allocated_mib == pytest.approx(usual, rel=0.05)
