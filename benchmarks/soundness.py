"""Does verification find what is wrong and accept what is right? Strategies broken on purpose, and right ones.

    python benchmarks/soundness.py [--workloads gpt llama] [--json FILE]

Each mutant breaks one thing in a strategy (what it saves, moves, divides, draws or updates) while the baseline it is
compared with stays right; a mutant is only run where it changes what is computed (a lost random state matters in a
model that draws). Right strategies are all of conf/strategy/ and the variants that the tests use. Prints, by number
format, how many mutants were found and how many right pairs were accepted, or refused by the cause that is known, and
writes benchmarks/results/soundness.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from small_workloads import STRATEGIES, config, data_of  # noqa: E402
from torch import Tensor  # noqa: E402

import sweep.strategy as strategy_module  # noqa: E402
import sweep.strategy.checkpointing as checkpointing  # noqa: E402
import sweep.trial.verify as verify_module  # noqa: E402
import sweep.workload.step as step_module  # noqa: E402
from sweep.config.schema import Dtype  # noqa: E402
from sweep.environment import environment  # noqa: E402
from sweep.results import Verification, write_json  # noqa: E402
from sweep.strategy.offload import PlainCopier  # noqa: E402
from sweep.workload import Workload  # noqa: E402
from sweep.workload.step import StepResult, run_step, split, update  # noqa: E402

CPU = torch.device("cpu")
WORKLOADS = ("gpt", "llama", "vit", "convnet", "stateful")
DTYPES = (Dtype.fp32, Dtype.amp_bf16, Dtype.amp_fp16)
DRAWS = ("gpt", "vit")  # models with dropout
MOVES = ("convnet", "stateful")  # models with state that a forward moves


@dataclass(frozen=True)
class Mutant:
    strategy: str  # what is broken
    broken: Callable[[], AbstractContextManager[object]]  # the fault is there, inside
    workloads: tuple[str, ...] = WORKLOADS  # where it changes what is computed
    dtypes: tuple[Dtype, ...] = DTYPES


MUTANTS: dict[str, Mutant] = {}


def mutant(strategy: str, **more: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(broken: Callable[[], Any]) -> Callable[[], Any]:
        manager = contextmanager(broken)
        MUTANTS[broken.__name__] = Mutant(strategy, manager, **more)
        return broken

    return add


# -- checkpointing ---------------------------------------------------------------------------------------------------


@contextmanager
def _checkpoint(change: Callable[..., Any]) -> Iterator[None]:
    """torch's checkpoint as the strategy calls it, through `change(checkpoint, function, *args, **kwargs)`."""
    real = checkpointing.checkpoint
    with patch.object(checkpointing, "checkpoint", lambda f, *a, **k: change(real, f, *a, **k)):
        yield


def _in_recomputation(change: Callable[[Any, tuple[Any, ...]], Any]) -> AbstractContextManager[None]:
    """Recomputation runs `change(function, args)` instead of the function."""

    def changed(real: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        runs = 0

        def twice(*given: Any) -> Any:
            nonlocal runs
            runs += 1
            return f(*given) if runs == 1 else change(f, given)

        return real(twice, *args, **kwargs)

    return _checkpoint(changed)


@mutant("checkpoint", workloads=DRAWS)
def recomputation_without_the_random_state() -> Iterator[None]:
    def careless(real: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        return real(f, *args, **(kwargs | {"preserve_rng_state": False}))

    with _checkpoint(careless):
        yield


@mutant("everything", workloads=DRAWS)
def recomputation_without_the_random_state_under_micro_batches() -> Iterator[None]:
    with MUTANTS["recomputation_without_the_random_state"].broken():
        yield


@mutant("checkpoint")
def recomputation_from_a_changed_input() -> Iterator[None]:
    def changed(f: Any, args: tuple[Any, ...]) -> Any:
        with torch.no_grad():
            args[0].data = args[0].data * 1.01
        return f(*args)

    with _in_recomputation(changed):
        yield


@mutant("checkpoint")
def recomputation_leaves_a_block_out() -> Iterator[None]:
    with _in_recomputation(lambda f, args: args[0] * 1.0):
        yield


@mutant("checkpoint", workloads=("convnet", "stateful"))
def state_is_moved_again_by_recomputation() -> Iterator[None]:
    def unguarded(real: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("context_fn", None)
        return real(f, *args, **kwargs)

    with _checkpoint(unguarded):
        yield


@mutant("checkpoint", dtypes=(Dtype.amp_bf16, Dtype.amp_fp16))
def recomputation_without_autocast() -> Iterator[None]:
    def wide(f: Any, args: tuple[Any, ...]) -> Any:
        with torch.autocast("cpu", enabled=False):
            return f(*args)

    with _in_recomputation(wide):
        yield


# -- offload ---------------------------------------------------------------------------------------------------------


@contextmanager
def _coming_back(change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """What comes back from the host goes through `change(number, tensor)`."""
    real, number = PlainCopier.from_host, 0

    def from_host(self: PlainCopier, handle: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return change(number, real(self, handle))

    with patch.object(PlainCopier, "from_host", from_host):
        yield


@mutant("offload")
def offload_gives_back_the_tensor_before() -> Iterator[None]:
    last: list[Tensor] = []

    def stale(number: int, tensor: Tensor) -> Tensor:
        before = last.pop() if last else None
        last.append(tensor.clone())
        same = before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype
        return before if same and before is not None else tensor

    with _coming_back(stale):
        yield


@mutant("offload")
def offload_rounds() -> Iterator[None]:
    def rounded(number: int, t: Tensor) -> Tensor:
        if t.dtype in (torch.float64, torch.float32):
            return t.bfloat16().to(t.dtype)
        return t.to(torch.float8_e5m2).to(t.dtype) if t.is_floating_point() else t

    with _coming_back(rounded):
        yield


@mutant("offload")
def offload_is_off_by_a_hundredth() -> Iterator[None]:
    with _coming_back(lambda number, t: t * 1.01 if t.is_floating_point() else t):
        yield


@mutant("offload")
def offload_swaps_elements() -> Iterator[None]:
    with _coming_back(lambda number, t: t.flip(0) if t.is_floating_point() else t):
        yield


@mutant("offload")
def offload_is_read_before_the_copy_has_ended() -> Iterator[None]:
    def half(number: int, t: Tensor) -> Tensor:
        if number % 3 == 0:
            t[len(t) // 2 :] = 0
        return t

    with _coming_back(half):
        yield


@mutant("offload")
def offload_loses_one_tensor() -> Iterator[None]:
    with _coming_back(lambda number, t: t.zero_() if number == 2 else t):
        yield


@mutant("offload_everything")
def offload_of_everything_rounds() -> Iterator[None]:
    with MUTANTS["offload_rounds"].broken():
        yield


# -- micro-batches ---------------------------------------------------------------------------------------------------

#: Micro-batches of a model whose state is moved by each of them are not equivalent to begin with.
PARTS = ("gpt", "llama", "vit")


@contextmanager
def _window(change: Callable[[list[Any]], list[Any]] = lambda parts: parts, weight: Any = None) -> Iterator[None]:
    """The window's micro-batches go through `change`; the loss of each is divided by `weight(targets, part)`."""
    real = step_module.accumulate_gradients

    def changed(workload: Workload, parts: list[Any], targets: int, *rest: Any, **more: Any) -> Tensor:
        if weight is None:
            return real(workload, change(parts), targets, *rest, **more)
        total = torch.zeros(())
        for part in change(parts):
            total = total + real(workload, [part], weight(targets, part, workload, len(parts)), *rest, **more)
        return total

    with patch.object(step_module, "accumulate_gradients", changed):
        yield


@mutant("micro_batch_unequal", workloads=PARTS)
def the_last_micro_batch_is_dropped() -> Iterator[None]:
    with _window(lambda parts: parts[:-1]):
        yield


@mutant("micro_batch_unequal", workloads=PARTS)
def the_first_micro_batch_is_computed_twice() -> Iterator[None]:
    with _window(lambda parts: parts[:1] + parts):
        yield


@mutant("micro_batch", workloads=PARTS)
def one_micro_batch_replaces_another() -> Iterator[None]:
    with _window(lambda parts: parts[:1] + parts[:1] + parts[2:]):
        yield


@mutant("micro_batch", workloads=PARTS)
def losses_are_not_divided_by_the_whole_window() -> Iterator[None]:
    with _window(weight=lambda targets, part, w, n: w.loss.count(part)):
        yield


@mutant("micro_batch_unequal", workloads=PARTS)
def the_mean_of_unequal_means() -> Iterator[None]:
    with _window(weight=lambda targets, part, w, n: w.loss.count(part) * n):
        yield


@mutant("micro_batch", workloads=PARTS)
def the_divisor_is_off_by_half_a_percent() -> Iterator[None]:
    with _window(weight=lambda targets, part, w, n: targets * 1.005):
        yield


@mutant("micro_batch", workloads=PARTS)
def gradients_are_not_accumulated() -> Iterator[None]:
    real = step_module.accumulate_gradients

    def last_only(workload: Workload, parts: list[Any], *rest: Any, **more: Any) -> Tensor:
        total = torch.zeros(())
        for part in parts:
            workload.optimizer.zero_grad(set_to_none=True)
            total = total + real(workload, [part], *rest, **more)
        return total

    with patch.object(step_module, "accumulate_gradients", last_only):
        yield


@mutant("micro_batch", workloads=PARTS)
def an_update_for_each_micro_batch() -> Iterator[None]:
    def each(workload: Workload, batch: Any, phases: Any, *, micro_batch_size: int, **more: Any) -> StepResult:
        results = [
            run_step(workload, part, phases, micro_batch_size=None, **more) for part in split(batch, micro_batch_size)
        ]
        return replace(results[-1], loss=torch.stack([r.loss for r in results]).mean())

    with patch.object(strategy_module, "run_step", each):
        yield


# -- the step, under any strategy ------------------------------------------------------------------------------------


@contextmanager
def _step(around: Callable[[Workload, Callable[[], StepResult]], StepResult]) -> Iterator[None]:
    def changed(workload: Workload, *args: Any, **more: Any) -> StepResult:
        return around(workload, lambda: run_step(workload, *args, **more))

    with patch.object(strategy_module, "run_step", changed):
        yield


@mutant("checkpoint")
def no_update() -> Iterator[None]:
    with patch.object(step_module, "update", lambda workload: 0):
        yield


@mutant("offload")
def two_updates() -> Iterator[None]:
    def twice(workload: Workload) -> int:
        return update(workload) + update(workload)

    with patch.object(step_module, "update", twice):
        yield


def _set(workload: Workload, key: str, factor: float) -> None:
    for group in workload.optimizer.param_groups:
        group[key] *= factor


@mutant("micro_batch", workloads=PARTS)
def another_learning_rate() -> Iterator[None]:
    def changed(workload: Workload, run: Callable[[], StepResult]) -> StepResult:
        if not workload.optimizer.state:
            _set(workload, "lr", 1.01)
            if workload.scheduler is not None:
                workload.scheduler.base_lrs = [lr * 1.01 for lr in workload.scheduler.base_lrs]
        return run()

    with _step(changed):
        yield


@mutant("checkpoint")
def one_update_with_another_learning_rate() -> Iterator[None]:
    def changed(workload: Workload, run: Callable[[], StepResult]) -> StepResult:
        _set(workload, "lr", 1.05)
        result = run()
        _set(workload, "lr", 1 / 1.05)
        return result

    with _step(changed):
        yield


@mutant("micro_batch", workloads=("gpt",))
def no_clipping() -> Iterator[None]:
    def changed(workload: Workload, run: Callable[[], StepResult]) -> StepResult:
        workload.conf = replace(workload.conf, grad_clip_norm=None)
        return run()

    with _step(changed):
        yield


@mutant("offload", workloads=("gpt",))
def the_scheduler_steps_twice() -> Iterator[None]:
    def changed(workload: Workload, run: Callable[[], StepResult]) -> StepResult:
        result = run()
        assert workload.scheduler is not None
        workload.scheduler.step()
        return result

    with _step(changed):
        yield


@mutant("checkpoint")
def one_parameter_is_not_trained() -> Iterator[None]:
    def changed(workload: Workload, run: Callable[[], StepResult]) -> StepResult:
        workload.parameters()[-1].requires_grad_(False)
        return run()

    with _step(changed):
        yield


@mutant("offload")
def a_number_is_drawn_on_the_way() -> Iterator[None]:
    def changed(workload: Workload, run: Callable[[], StepResult]) -> StepResult:
        torch.rand(1)
        return run()

    with _step(changed):
        yield


@mutant("checkpoint")
def gradients_of_the_step_before_stay() -> Iterator[None]:
    real = torch.optim.Optimizer.zero_grad

    def keep(self: Any, set_to_none: bool = True) -> None:
        if not self.state:
            real(self, set_to_none)

    with patch.object(torch.optim.Optimizer, "zero_grad", keep):
        yield


# -- running them ----------------------------------------------------------------------------------------------------


@contextmanager
def broken_but_the_baseline(fault: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Verification's runs have the fault, except the references that they are compared with."""
    real = verify_module.run_and_record

    def run(conf: Any, strategy: Any, *rest: Any) -> Any:
        with fault() if strategy.name != "baseline" else nullcontext():
            return real(conf, strategy, *rest)

    # References are shared between mutants: they are right. What a mutant computed is not kept for another.
    kept = dict(verify_module._records)
    with patch.object(verify_module, "run_and_record", run):
        yield
    verify_module._records.clear()
    verify_module._records.update(kept)


def is_found(name: str, workload: str, dtype: Dtype) -> tuple[bool, str]:
    """Whether verification rejects a mutant, and its words."""
    m = MUTANTS[name]
    c = config(workload, m.strategy)
    c.workload = replace(c.workload, dtype=dtype)
    if workload == "gpt":
        c.workload.grad_clip_norm = 0.1  # so low that it clips
    with broken_but_the_baseline(m.broken):
        try:
            found = verify_module.verify(c, CPU, data_of(c.workload))
        except Exception as error:  # broken so badly that it does not run: it is not accepted
            return True, f"{type(error).__name__}: {error}"
    return not found.passed and found.status == "not_equal", found.reason or found.status


def verified(workload: str, strategy: str, dtype: Dtype) -> Verification | str:
    c = config(workload, strategy)
    c.workload = replace(c.workload, dtype=dtype)
    try:
        return verify_module.verify(c, CPU, data_of(c.workload))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


#: Right strategies that cannot be equivalent: by workload, the causes that are right.
RIGHTLY_REFUSED = {"convnet": ("batch_statistics",), "stateful": ("state",)}


@dataclass
class Counts:
    mutants: int = 0
    found: int = 0
    right: int = 0
    accepted: int = 0
    rightly_refused: int = 0
    missed: list[str] = field(default_factory=list)
    wrongly_refused: list[str] = field(default_factory=list)


def count(dtype: Dtype, workloads: tuple[str, ...]) -> Counts:
    counts = Counts()
    for workload in workloads:
        for name, m in MUTANTS.items():
            if workload in m.workloads and dtype in m.dtypes:
                found, words = is_found(name, workload, dtype)
                counts.mutants += 1
                counts.found += found
                if not found:
                    counts.missed.append(f"{workload}: {name} ({words})")
        for strategy in STRATEGIES:
            if strategy == "baseline" or (workload, strategy) == ("convnet", "parts_all"):
                continue  # parts of parts whose ReLU overwrites its input: autograd itself refuses
            result = verified(workload, strategy, dtype)
            counts.right += 1
            if isinstance(result, Verification) and result.status == "equal":
                counts.accepted += 1
            elif isinstance(result, Verification) and result.cause in RIGHTLY_REFUSED.get(workload, ()):
                counts.rightly_refused += 1
            else:
                words = result if isinstance(result, str) else result.reason
                counts.wrongly_refused.append(f"{workload}: {strategy} ({words})")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "soundness.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"{len(MUTANTS)} broken strategies and the right ones, on {', '.join(arguments.workloads)}")
    columns = ("number format", "mutants", "found", "right pairs", "accepted", "refused by their cause", "wrong")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    results, wrong = {}, []
    for dtype in DTYPES:
        c = count(dtype, tuple(arguments.workloads))
        results[dtype.name] = c
        wrong += [f"{dtype.name} {words}" for words in c.missed + c.wrongly_refused]
        table.add_row(
            dtype.name, str(c.mutants), str(c.found), str(c.right), str(c.accepted), str(c.rightly_refused),
            str(len(c.missed) + len(c.wrongly_refused)),
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    for line in wrong:
        console.print(line, markup=False)
    write_json({"environment": environment(), "mutants": sorted(MUTANTS), "results": results}, arguments.json)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
