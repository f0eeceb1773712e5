"""The way home: a strategy in one's own loop, and the printed lines for each framework, run as they are printed."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from small_workloads import GPT, TOKENS, config
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

import sweep
from sweep.config.schema import Config
from sweep.errors import BadInput, NothingOffloaded
from sweep.report import judge, write_report
from sweep.report.use_it import Use, uses
from sweep.results import TrialResult
from sweep.trial.trial import run_trial, save
from sweep.workload import build_data, build_workload, find_blocks

CPU = torch.device("cpu")
STEPS = 4
GPT_WITHOUT_DROPOUT = {"model": GPT | {"dropout": 0.0}, "data": TOKENS, "grad_clip_norm": 1.0}
STRATEGIES: dict[str, dict[str, Any]] = {
    "micro_batch": {"micro_batch_size": 4},
    "checkpoint": {"checkpoint": {"granularity": "blocks"}},
    "checkpoint_every_2": {"checkpoint": {"granularity": "blocks", "every_k": 2}},
    "selective": {"checkpoint": {"granularity": "selective"}},
    "segments": {"checkpoint": {"granularity": "segments", "segment_size": 2}},
    "offload": {"offload": {"placement": "all", "min_tensor_kib": 0.25}},
    "offload_inputs": {"offload": {"placement": "inputs", "min_tensor_kib": 0.25}},
    "everything": {
        "micro_batch_size": 4,
        "checkpoint": {"granularity": "blocks"},
        "offload": {"placement": "all", "min_tensor_kib": 0.25, "keep_last": 0},
    },
}


def config_of(strategy: str, workload: dict[str, Any] | None = None) -> Config:
    measure = {"warmup_steps": 1, "steps": STEPS - 1, "repeats": 1, "eval_batches": 0, "verify": False}
    own = {"name": strategy, **STRATEGIES.get(strategy, {})}
    return config({**(workload or GPT_WITHOUT_DROPOUT), "global_batch_size": 8}, own, measure=measure)


@pytest.fixture(scope="module")
def trials() -> dict[str, TrialResult]:
    found = {name: run_trial(config_of(name), name) for name in STRATEGIES}
    assert {r.outcome for r in found.values()} == {"ok"}, {n: r.error for n, r in found.items()}
    return found


def use(result: TrialResult, where: str) -> Use:
    return next(u for u in uses(result) if u.where.startswith(where) and ("without" in u.where) == ("without" in where))


def losses_of(result: TrialResult) -> list[float]:
    assert result.measurement is not None
    return result.measurement.train_loss


class Mine:
    """A person's own training: the trial's weights and batches, and a mean loss that notes what it gave."""

    def __init__(self, result: TrialResult, c: Config) -> None:
        w = build_workload(c.workload, CPU, build_data(c.workload))
        self.model, self.optimizer, self.workload, self.seen = w.model, w.optimizer, w, list[float]()
        self.batches = [w.train_batch(i) for i in range(STEPS)]

    def loss_function(self, logits: Any, targets: Tensor) -> Tensor:
        logits = getattr(logits, "logits", logits)
        loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
        self.seen.append(loss.item())
        return loss

    def steps(self) -> list[float]:
        """A loss for each optimizer step: its parts are of one size."""
        parts = len(self.seen) // STEPS
        return [sum(self.seen[i * parts : (i + 1) * parts]) / parts for i in range(STEPS)]

    def samples(self) -> list[dict[str, Tensor]]:
        return [{k: v[i] for k, v in batch.items()} for batch in self.batches for i in range(len(batch["inputs"]))]

    def run(self, code: str, **more: Any) -> dict[str, Any]:
        names = {k: getattr(self, k) for k in ("model", "optimizer", "loss_function", "batches")}
        names |= {"device": "cpu", **more}
        exec(compile(code, "<printed>", "exec"), names)
        return names


# -- one's own loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("where", ["plain torch", "plain torch, without this package"])
def test_the_printed_loop_trains_to_the_losses_of_the_trial(
    trials: dict[str, TrialResult], where: str, name: str
) -> None:
    told = use(trials[name], where)
    if not told.code:
        assert name in ("segments", "offload_inputs") and told.note
        return
    mine = Mine(trials[name], config_of(name))
    forward = mine.model.forward
    mine.run(told.code)
    assert mine.steps() == pytest.approx(losses_of(trials[name]), rel=1e-5)
    if "without" not in where:
        assert mine.model.forward == forward  # the model is as it was


def test_a_printed_strategy_does_what_the_trial_did(trials: dict[str, TrialResult]) -> None:
    """Not only the same losses: as many bytes go to the host as in a step of the trial."""
    mine = Mine(trials["offload"], config_of("offload"))
    strategy = sweep.apply(mine.model, trials["offload"])
    with strategy.forward():
        loss = mine.loss_function(mine.model(mine.batches[0]["inputs"]), mine.batches[0]["targets"])
    loss.backward()
    m = trials["offload"].measurement
    assert m is not None and strategy.moved_bytes == round(m.to_host_mib * 2**20) > 0
    strategy.remove()
    with sweep.apply(mine.model, offload={"placement": "all", "min_tensor_kib": 1e6}) as none:
        mine.model(mine.batches[0]["inputs"]).sum().backward()
        with pytest.raises(NothingOffloaded):
            none.check()


def test_a_models_own_forward_is_inside_of_offload_by_itself(trials: dict[str, TrialResult]) -> None:
    mine = Mine(trials["offload"], config_of("offload"))
    with sweep.apply(mine.model, "offload", offload={"min_tensor_kib": 0.25}) as strategy:
        mine.model(mine.batches[0]["inputs"]).sum().backward()
        assert strategy.moved_bytes > 0
        before = strategy.moved_bytes
        with torch.no_grad():
            mine.model(mine.batches[0]["inputs"])
        assert strategy.moved_bytes == before
    assert "forward" not in vars(mine.model)


def test_a_strategy_is_named_by_option_file_folder_or_run(
    trials: dict[str, TrialResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Mine(trials["checkpoint"], config_of("checkpoint")).model
    results = [run_trial(config_of("baseline"), "baseline"), *copy.deepcopy(list(trials.values()))]
    for i, result in enumerate(results):
        save(result, tmp_path / "sweep" / f"{i}_{result.name}")
    report = write_report(judge(results), tmp_path / "sweep")
    (tmp_path / "sweep").rename(tmp_path / "moved")
    preferred = report.sections[0].comparison.preferred
    assert preferred is not None
    for given in (tmp_path / "moved", tmp_path / "moved" / "report.json"):
        with sweep.apply(model, given) as strategy:
            assert strategy.conf.name == preferred
    with sweep.apply(model, tmp_path / "moved" / "2_checkpoint" / "result.json") as strategy:
        assert (strategy.conf.name, strategy.blocks) == ("checkpoint", [b.name for b in find_blocks(model)])
    with sweep.apply(model, "micro_batch", batch_size=8) as strategy:
        assert strategy.micro_batch_size == 2
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    store = mlflow.MlflowClient()
    run_id = store.create_run(store.create_experiment("mine", str(tmp_path / "artifacts"))).info.run_id
    store.log_artifact(run_id, str(tmp_path / "moved" / "2_checkpoint" / "result.json"))
    with sweep.apply(model, run_id) as strategy:
        assert strategy.conf.name == "checkpoint"


@pytest.mark.parametrize(
    ("given", "settings", "key"),
    [
        ("chekpoint", {}, "strategy"),
        ("micro_batch", {}, "strategy"),  # a share of a batch that is not known
        ("0" * 32, {"tracking_uri": "sqlite:////nowhere/mlflow.db"}, "strategy"),
        (None, {"micro_batch_size": 0}, "strategy.micro_batch_size"),
        (None, {"checkpoint": {"granularity": "some"}}, "strategy.checkpoint.granularity"),
        (None, {"checkpoints": {}}, "strategy.checkpoints"),
        ("checkpoint", {"blocks": "layers.*"}, "workload.blocks"),
    ],
)
def test_what_cannot_be_applied_is_one_line(given: Any, settings: dict[str, Any], key: str) -> None:
    model = build_workload(config_of("baseline").workload, CPU).model
    with pytest.raises(BadInput) as caught:
        sweep.apply(model, given, **settings)
    assert caught.value.key == key
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("size", [1, 3, 8, None])
def test_weighted_parts_add_up_to_the_gradient_of_the_whole(size: int | None) -> None:
    """Also where parts hold unlike numbers of targets, and where one holds none."""
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    targets = torch.randint(7, (8, 4))
    targets[:3, 1:] = -100
    targets[5:] = -100
    batch = {"inputs": torch.randn(8, 4, 5), "targets": targets, "name": "mine"}

    def mean(part: dict[str, Any]) -> Tensor:
        logits = model(part["inputs"]).flatten(0, 1)
        return F.cross_entropy(logits, part["targets"].flatten(), ignore_index=-100, reduction="sum") / max(
            1, int((part["targets"] != -100).sum())
        )

    mean(batch).backward()
    expected = model.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    for part, weight in sweep.micro_batches(batch, size):
        assert part["name"] == "mine"
        (mean(part) * weight).backward()
    torch.testing.assert_close(model.weight.grad, expected)


def test_weights_of_a_librarys_labels_and_of_a_count_of_ones_own() -> None:
    transformers = pytest.importorskip("transformers")
    labels = torch.tensor([[1, 2, 3], [1, -100, -100], [1, 2, -100]])
    batch = transformers.BatchEncoding({"input_ids": labels.clamp(min=0), "labels": labels})
    assert [w for _, w in sweep.micro_batches(batch, 1)] == [2 / 3, 0.0, 1 / 3]  # the first token is no target
    assert [w for _, w in sweep.micro_batches([torch.ones(4, 2)], 1)] == [0.25] * 4
    assert [w for _, w in sweep.micro_batches([torch.ones(4, 2)], 3, count=lambda part: len(part[0]) ** 2)] == [
        9 / 16, 1 / 16,
    ]  # fmt: skip


def test_the_package_itself_loads_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, sweep; sweep.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- frameworks -------------------------------------------------------------------------------------------------------

HF = {
    "model": {
        "_target_": "sweep.workload.hf.causal_lm",
        "config": {
            "model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 3, "num_attention_heads": 4,
        },
    },
    "data": TOKENS,
    "grad_clip_norm": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ["micro_batch", "checkpoint", "checkpoint_every_2", "offload", "everything"])
def test_the_trainer_with_the_printed_arguments_has_the_losses_of_the_trial(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    c = config_of(name, HF)
    result = run_trial(c, name)
    assert result.outcome == "ok", result.error
    mine = Mine(result, c)
    told = use(result, "transformers")
    arguments = mine.run(told.code)["arguments"]
    assert arguments.gradient_checkpointing is (name == "checkpoint")
    for key, value in {
        "output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "logging_steps": 1, "num_train_epochs": 1,
        "save_strategy": "no", "remove_unused_columns": False, "disable_tqdm": True,
    }.items():  # fmt: skip
        setattr(arguments, key, value)

    class InOrder(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"].flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch

    samples = [{"input_ids": s["inputs"], "labels": s["targets"]} for s in mine.samples()]
    trainer = InOrder(mine.model, arguments, train_dataset=samples, compute_loss_func=loss)
    trainer.train()
    seen = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert seen == pytest.approx(losses_of(result), abs=2e-4)  # the Trainer rounds what it logs


@pytest.mark.parametrize("name", ["micro_batch", "checkpoint", "offload", "everything"])
def test_the_printed_lines_for_accelerate(trials: dict[str, TrialResult], name: str) -> None:
    pytest.importorskip("accelerate")
    mine = Mine(trials[name], config_of(name))
    size = trials[name].config["strategy"]["micro_batch_size"] or 8
    batches = DataLoader(mine.samples(), batch_size=size)  # type: ignore[arg-type]
    mine.run(use(trials[name], "Accelerate").code, batches=batches)
    assert mine.steps() == pytest.approx(losses_of(trials[name]), rel=1e-5)


@pytest.mark.parametrize("name", ["micro_batch", "checkpoint", "offload", "everything"])
def test_the_printed_lines_for_lightning(
    trials: dict[str, TrialResult], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning")
    mine = Mine(trials[name], config_of(name))

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = mine.model

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return mine.loss_function(self.model(batch["inputs"]), batch["targets"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return mine.optimizer

    quiet = {
        "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(tmp_path),
    }  # fmt: skip
    original = lightning.Trainer
    monkeypatch.setattr(lightning, "Trainer", lambda **keys: original(**keys, **quiet))
    trainer = mine.run(use(trials[name], "Lightning").code)["trainer"]
    size = trials[name].config["strategy"]["micro_batch_size"] or 8
    trainer.fit(Module(), DataLoader(mine.samples(), batch_size=size))  # type: ignore[arg-type]
    assert mine.steps() == pytest.approx(losses_of(trials[name]), rel=1e-5)


def test_keys_of_torchtitan_and_torchtune_say_the_same(trials: dict[str, TrialResult]) -> None:
    """Their libraries are not run here: that the text is TOML and YAML, and its numbers are the trial's."""
    titan = tomllib.loads(use(trials["checkpoint_every_2"], "torchtitan").code)
    assert titan == {
        "training": {"local_batch_size": 8, "global_batch_size": 8},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    }
    tune = yaml.safe_load(use(trials["everything"], "torchtune").code)
    assert tune == {
        "batch_size": 4, "gradient_accumulation_steps": 2, "enable_activation_checkpointing": True,
        "enable_activation_offloading": True,
    }  # fmt: skip
    for name, where in (("offload", "torchtitan"), ("offload", "torchtune"), ("selective", "torchtune")):
        assert use(trials[name], where).code == "" and use(trials[name], where).note


def test_every_report_ends_with_the_way_home(trials: dict[str, TrialResult], tmp_path: Path, capsys: Any) -> None:
    from sweep.report import print_report

    results = [run_trial(config_of("baseline"), "baseline"), copy.deepcopy(trials["checkpoint"])]
    results[1].config["budget"] = results[0].config["budget"]
    peak = trials["checkpoint"].peak_mib
    assert peak is not None
    for r in results:
        r.config["budget"]["memory_mib"] = peak * 1.01
        r.budgets = [r.config["budget"]]
    report = write_report(judge(results), tmp_path)
    print_report(report)
    shown = capsys.readouterr().out
    assert 'sweep.apply(model, checkpoint={"granularity": "blocks"}' in shown
    text, page = report.markdown_path.read_text(encoding="utf-8"), report.html_path.read_text(encoding="utf-8")
    for told in uses(results[1]):
        assert not told.code or f"```{told.language}\n{told.code}\n```" in text
        assert told.where.split(" ")[0] in page
