"""What a trial costs beside its measured steps, against a bare training loop of the same steps.

    python benchmarks/overhead.py [--workload gpt_tiny] [--strategy baseline checkpoint] [--steps 30]

The bare loop is what a person would write: model, data, optimizer, the same batches, warm-up and timed steps, nothing
else. The trial is the whole of it: prediction, verification (also in steps of the first row's loop, without the
baseline's own, which a comparison shares), the ledger's pass, evaluation, MLflow, result.json. Both
run in this process, interleaved (bare, trial, bare, trial), after one trial that warms up imports and stores. Writes
benchmarks/results/overhead.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sweep import tracking  # noqa: E402, I001  (before torch: it sets how OpenMP's threads wait)
import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from sweep.environment import environment  # noqa: E402
from sweep.trial.measure import memory_pass  # noqa: E402
from sweep.memory.device import resolve_device  # noqa: E402
from sweep.trial.predict import predict  # noqa: E402
from sweep.results import write_json  # noqa: E402
from sweep.config.check import typed# noqa: E402
from sweep.config.schema import Config# noqa: E402
from sweep.session import Session  # noqa: E402
from sweep.workload.step import Phases, run_step  # noqa: E402
from sweep.strategy import applied  # noqa: E402
import sweep.trial.verify as verify_module  # noqa: E402
from sweep.trial.verify import verify  # noqa: E402
from sweep.workload import build_data, build_workload  # noqa: E402

CPU = torch.device("cpu")


def bare_loop(config: Config) -> tuple[float, list[float]]:
    """Seconds of the whole loop from building the model on, and of each timed step."""
    m = config.measure
    started = time.perf_counter()
    workload = build_workload(config.workload, CPU, build_data(config.workload))
    phases, times = Phases(), []
    with applied(
        config.strategy,
        workload.model,
        workload.blocks,
        config.workload.global_batch_size,
        phases,
        CPU,
        workload.loss_state,
    ) as strategy:
        for step in range(m.warmup_steps + m.steps * m.repeats):
            begin = time.perf_counter()
            run_step(
                workload,
                workload.train_batch(step),
                phases,
                micro_batch_size=strategy.micro_batch_size,
                around_forward=strategy.around_forward,
            )
            if step >= m.warmup_steps:
                times.append(time.perf_counter() - begin)
    return time.perf_counter() - started, times


def timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _verification(config: Config, data: Any) -> dict[str, float]:
    """Seconds of a strategy's own part, and of the baseline's, which is computed once for all of a comparison."""
    verify_module._records.clear()
    found = []
    total = timed(lambda: found.append(verify(config, CPU, data)))
    return {"verify_s": found[0].seconds, "verify_shared_s": total - found[0].seconds}


def measure_strategy(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    overrides = [
        f"workload={arguments.workload}",
        f"strategy={name}",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
        f"measure.steps={arguments.steps}",
        "measure.repeats=1",
        "compare=false",
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = typed(compose("config", overrides))
    config.device = resolve_device(config.device)
    session = Session.open(folder / name, config, overrides, trials=None, sweep=False)
    session.display.console.quiet = True
    session._trial(config, name, folder / name / "warm-up", overrides)
    loops, trials, bare_steps, trial_steps = [], [], [], []
    for repeat in range(arguments.repeats):
        total, times = bare_loop(config)
        loops.append(total)
        bare_steps += times
        begin = time.perf_counter()
        result = session._trial(config, name, folder / name / str(repeat), overrides)
        trials.append(time.perf_counter() - begin)
        assert result.measurement is not None, result.error
        trial_steps += [t / 1000 for t in result.measurement.step_times_ms]
    data = build_data(config.workload)
    parts = {
        "predict_s": timed(lambda: predict(config, data=data)),
        **({"verify_s": 0.0, "verify_shared_s": 0.0} if result.is_baseline else _verification(config, data)),
        "ledger_s": timed(lambda: memory_pass(config, CPU, data)),
    }
    tracking.close_sweep(session._store, session.state.parent_run_id)
    bare, trial = statistics.median(loops), statistics.median(trials)
    bare_step, trial_step = statistics.median(bare_steps), statistics.median(trial_steps)
    return {
        "workload": arguments.workload,
        "strategy": name,
        "bare_loop_s": bare,
        "trial_s": trial,
        "overhead_s": trial - bare,
        **parts,
        "bare_step_ms": bare_step * 1000,
        "trial_step_ms": trial_step * 1000,
        "step_overhead_ratio": trial_step / bare_step - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt_tiny")
    parser.add_argument("--strategy", nargs="+", default=["baseline", "micro_batch", "checkpoint", "offload"])
    parser.add_argument("--steps", type=int, default=15, help="timed steps of a trial")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved pairs of loop and trial")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/overhead.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure_strategy(name, arguments, Path(folder)) for name in arguments.strategy]
    table = Table(title=f"A trial against a bare loop of the same steps ({arguments.workload}, CPU)")
    for column in ("strategy", "bare loop s", "trial s", "overhead s", "of it: predict", "verify", "in steps", "shared",
                   "ledger", "bare step ms", "trial step ms", "step overhead"):  # fmt: skip
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for r in rows:
        table.add_row(
            r["strategy"], f"{r['bare_loop_s']:.2f}", f"{r['trial_s']:.2f}", f"{r['overhead_s']:.2f}",
            f"{r['predict_s']:.2f}", f"{r['verify_s']:.2f}", f"{r['verify_s'] / rows[0]['bare_step_ms'] * 1000:.1f}",
            f"{r['verify_shared_s']:.2f}", f"{r['ledger_s']:.2f}",
            f"{r['bare_step_ms']:.1f}", f"{r['trial_step_ms']:.1f}", f"{100 * r['step_overhead_ratio']:+.2f} %",
        )  # fmt: skip
    Console(width=160).print(table)
    write_json({"environment": environment(), "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
