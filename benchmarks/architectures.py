"""Every strategy on public architectures: what it saves, whether it computes the same, and whether the peak was known.

    python benchmarks/architectures.py [--only gpt2 unet] [--strategy checkpoint offload] [--json PATH]

The architectures are those of architectures_zoo.py, tiny and on the CPU; peaks are the ledger's, `saved` is their
difference to the baseline's. `evidence` is cpu throughout: what is shown here is that verdicts and predictions hold,
not what a strategy gains on a device. Writes benchmarks/results/architectures.json and .md.
tests/test_architectures.py asks the same code for what is not right.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.architectures_zoo import ZOO, Architecture  # noqa: E402
from sweep.config.check import typed  # noqa: E402
from sweep.config.schema import Config  # noqa: E402
from sweep.environment import environment  # noqa: E402
from sweep.errors import SweepError, one_line  # noqa: E402
from sweep.results import write_json  # noqa: E402
from sweep.trial.measure import memory_pass  # noqa: E402
from sweep.trial.predict import predict  # noqa: E402
from sweep.trial.verify import verify  # noqa: E402
from sweep.workload import DataSource, Workload, build_data, build_workload, to_device  # noqa: E402

CPU = torch.device("cpu")
RESULTS = ROOT / "benchmarks/results"
TOLERANCE = 1e-4  # of predicted against measured bytes
LARGER_PART = 0.5  # of the activations that lie in the blocks
STRATEGIES = tuple(
    sorted((p.stem for p in (ROOT / "conf/strategy").glob("*.yaml")), key=lambda name: (name != "baseline", name))
)


@dataclass
class Pair:
    """One strategy on one architecture. What raised is in words, and the words of anything unforeseen begin with !."""

    architecture: str
    strategy: str
    peak_mib: float | None = None  # the ledger's
    saved_mib: float | None = None  # to the baseline's
    predicted_mib: float | None = None
    not_measured: str = ""
    not_predicted: str = ""
    equal: bool = False
    bit_equal: bool = False
    compared_share: float | None = None  # of the trained parameters, those whose gradients were evidence
    cause: str = ""  # why not equal: the code of the cause where it is known, what it names, and what differs
    seconds: float = 0.0


@dataclass
class Examined:
    """An architecture under every strategy."""

    name: str
    blocks: list[str] = field(default_factory=list)  # patterns of those that were found
    share: float = 0.0  # of the baseline's activations that lie in them, by bytes
    pairs: dict[str, Pair] = field(default_factory=dict)


def config_of(name: str, strategy: str) -> Config:
    """The architecture under a strategy of conf/strategy/; offload moves small tensors too."""
    node = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/strategy/{strategy}.yaml"), resolve=False)
    assert isinstance(node, dict)
    if "offload" in node:
        node["offload"] |= {"min_tensor_kib": 0.25}
    workload = {"name": name, "seed": 3} | ZOO[name].workload
    return typed({"workload": workload, "strategy": node, "device": {"name": "cpu", "type": "cpu"}})


def examine(name: str, strategies: tuple[str, ...] = STRATEGIES) -> Examined:
    """Predict, measure and verify the strategies on the architecture; never raises what a pair raises."""
    data = build_data(config_of(name, "baseline").workload)
    found = Examined(name)
    workload = build_workload(config_of(name, "baseline").workload, CPU, data)
    found.blocks = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", block.name) for block in workload.blocks})
    found.share = share_in_blocks(workload)
    for strategy in strategies:
        pair = found.pairs[strategy] = _pair(name, strategy, data)
        baseline = found.pairs["baseline"].peak_mib if "baseline" in found.pairs else None
        if pair.peak_mib is not None and baseline is not None:
            pair.saved_mib = baseline - pair.peak_mib
    return found


def _pair(name: str, strategy: str, data: DataSource) -> Pair:
    pair, config, started = Pair(name, strategy), config_of(name, strategy), time.perf_counter()
    prediction, pair.not_predicted = _attempt(lambda: predict(config, data=data, emulations="cpu"))
    pair.predicted_mib = prediction.allocated_mib if prediction is not None else None
    seen, pair.not_measured = _attempt(lambda: memory_pass(config, CPU, data))
    if seen is not None:
        pair.peak_mib = seen.peak.mib if seen.peak is not None else None
        pair.not_measured = "" if seen.peak is not None else "; ".join(seen.caveats)
    verification, pair.cause = _attempt(lambda: verify(config, CPU, data))
    if verification is not None:
        v = verification
        pair.equal, pair.bit_equal, pair.compared_share = v.passed, v.bit_equal, v.compared_share
        pair.cause = ": ".join(text for text in (v.cause, v.where, v.reason) if text)
    pair.seconds = time.perf_counter() - started
    return pair


def _attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return call(), ""
    except SweepError as error:
        return None, str(error)
    except Exception as error:
        return None, f"! {one_line(error)}"


def share_in_blocks(workload: Workload) -> float:
    """Of the bytes that the baseline saves for backward, the part that is saved while a block runs."""
    resident = {t.untyped_storage()._cdata for t in [*workload.model.parameters(), *workload.model.buffers()]}
    batch = to_device(workload.train_batch(0), CPU)
    resident |= {t.untyped_storage()._cdata for t in batch.values()}
    saved: dict[int, Tensor] = {}  # by storage, kept so that no address recurs
    inside: Counter[bool] = Counter()
    depth = 0

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in resident and storage._cdata not in saved:
            saved[storage._cdata] = tensor.detach()
            inside[depth > 0] += storage.nbytes()
        return tensor

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with _hooks([b.module for b in workload.blocks], enter, leave), saving, workload.autocast():
        workload.loss(workload.model, batch)
    return inside[True] / max(inside.total(), 1)


@contextmanager
def _hooks(modules: list[nn.Module], before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(before) for m in modules]
    handles += [m.register_forward_hook(after, always_call=True) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- what is right ------------------------------------------------------------------------------------------------


def wrong_with_blocks(found: Examined, architecture: Architecture) -> str:
    """What is not right about the blocks, in words; "" where all is."""
    if not architecture.has_blocks:
        return f"{found.blocks} were taken for blocks" if found.blocks else ""
    if found.share < LARGER_PART:
        return f"{', '.join(found.blocks) or 'no blocks'}: {found.share:.0%} of the activations lie in them"
    return ""


def wrong_with(pair: Pair, architecture: Architecture) -> str:
    """What is not right about a pair, in words; "" where all is."""
    expected = architecture.refused.get(pair.strategy, "")
    wrong = [text for text in (pair.not_measured, pair.not_predicted, pair.cause) if text.startswith("!")]
    if not wrong:
        wrong = [w for w in (_wrong_peak(pair, architecture, expected), _wrong_verdict(pair, expected)) if w]
    return "; ".join(wrong)


def _wrong_peak(pair: Pair, architecture: Architecture, refused: str) -> str:
    if pair.not_measured:
        stated = refused and re.search(refused, pair.not_measured) and re.search(refused, pair.not_predicted)
        return "" if stated else f"not measured: {pair.not_measured}, nor predicted: {pair.not_predicted}"
    if pair.not_predicted:
        stated = architecture.unpredictable and re.search(architecture.unpredictable, pair.not_predicted)
        return "" if stated else f"not predicted: {pair.not_predicted}"
    assert pair.predicted_mib is not None and pair.peak_mib is not None
    error = abs(pair.predicted_mib / pair.peak_mib - 1)
    return "" if error <= TOLERANCE else f"predicted {pair.predicted_mib:.4f} MiB, measured {pair.peak_mib:.4f} MiB"


def _wrong_verdict(pair: Pair, refused: str) -> str:
    if pair.equal:
        return f"accepted, but {refused!r} does not hold" if refused else ""
    if not refused:
        return f"refused: {pair.cause}"
    return "" if re.search(refused, pair.cause) else f"refused for another cause than {refused!r}: {pair.cause}"


@cache
def examined(name: str) -> Examined:
    """`examine`, once per process."""
    return examine(name)


# -- the table ------------------------------------------------------------------------------------------------------


def cell(pair: Pair) -> str:
    """Saved share of the baseline's peak and the verdict."""
    if pair.peak_mib is None:
        return "refused" if not pair.not_measured.startswith("!") else "failed"
    saved = "" if pair.saved_mib is None else f"{-pair.saved_mib / (pair.peak_mib + pair.saved_mib):+.0%} "
    return saved + ("equal" if pair.equal else "failed" if pair.cause.startswith("!") else "refused")


def markdown(rows: list[Examined]) -> str:
    """The table, then what was refused and why."""
    strategies = [s for s in STRATEGIES if any(s in row.pairs for row in rows)]
    head = ["architecture", "blocks", "share", "baseline MiB", *(s for s in strategies if s != "baseline")]
    lines = [
        "# Strategies on public architectures",
        "",
        "Tiny, on the CPU (evidence: cpu): the ledger's peak against the baseline's, and whether the strategy computes "
        "the same. `share`: of the bytes saved for backward, those saved inside of the blocks.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in rows:
        baseline = row.pairs.get("baseline")
        peak = f"{baseline.peak_mib:.2f}" if baseline and baseline.peak_mib is not None else ""
        blocks = ", ".join(f"`{b}`" for b in row.blocks) or "none"
        cells = [cell(row.pairs[s]) if s in row.pairs else "" for s in strategies if s != "baseline"]
        lines.append(f"| {' | '.join([row.name, blocks, f'{row.share:.0%}' if row.blocks else '', peak, *cells])} |")
    pairs = [pair for row in rows for pair in row.pairs.values()]
    exact = [p for p in pairs if p.predicted_mib is not None and p.peak_mib is not None]
    within = sum(abs(p.predicted_mib / p.peak_mib - 1) <= TOLERANCE for p in exact)  # type: ignore[operator]
    equal, bits = sum(p.equal for p in pairs), sum(p.bit_equal for p in pairs)
    lines += [
        "",
        f"{len(pairs)} pairs: {equal} equal ({bits} to the bit), {len(pairs) - equal} not. "
        f"{within} of {len(exact)} predictions are within {TOLERANCE:.2%} of the ledger; the others were refused.",
        "",
        "| architecture | strategies | what | cause |",
        "|---|---|---|---|",
    ]
    causes: dict[tuple[str, str, str], list[str]] = {}
    for p in pairs:
        if p.cause:
            causes.setdefault((p.architecture, "not equal", p.cause), []).append(p.strategy)
        if p.not_predicted and p.not_predicted != p.cause:
            causes.setdefault((p.architecture, "not predicted", p.not_predicted), []).append(p.strategy)
    for (name, what, cause), found in causes.items():
        listed = "all" if len(found) == len(strategies) > 1 else ", ".join(found)
        lines.append(f"| {name} | {listed} | {what} | {_escaped(cause)} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="ARCHITECTURE")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--json", type=Path, default=RESULTS / "architectures.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.only:
        row = examine(name, tuple(arguments.strategy))
        rows.append(row)
        wrong = [f"{p.strategy}: {w}" for p in row.pairs.values() if (w := wrong_with(p, ZOO[name]))]
        wrong = [w for w in [wrong_with_blocks(row, ZOO[name])] if w] + wrong
        print(f"{name}: {', '.join(row.blocks)} {row.share:.0%}, {sum(p.seconds for p in row.pairs.values()):.1f} s")
        for text in wrong:
            print(f"  WRONG {text}")
    table = markdown(rows)
    print(f"\n{table}")
    write_json({"environment": environment(), "rows": [asdict(row) for row in rows]}, arguments.json)
    arguments.json.with_suffix(".md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
