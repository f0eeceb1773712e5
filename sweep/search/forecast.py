"""Whether a candidate fits, before it is run: its predicted peak, corrected by what was measured so far.

Two limits are compared. `budget.memory_mib` caps the peak of allocated memory, as in every verdict. The device's own
capacity (`device.capacity_mib` less driver and context) must hold what the allocator has to reserve.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from sweep.config.device import allocator_capacity
from sweep.config.schema import Config, WorkloadConf, plain
from sweep.config.strategy_names import digest, effective, fixed_id, strategy_id
from sweep.format import mib, percent
from sweep.memory.device import resolve_device
from sweep.results import MIB, Prediction
from sweep.trial.predict import predict
from sweep.workload import DataSource, build_data

#: A replay that ends out of memory although enough seems free (fragmentation) is over the limit by at least this share.
LEAST_OVER = 1e-3


@dataclass
class Judgement:
    """One candidate's prediction against the limits."""

    prediction: Prediction
    allocated_mib: float  # corrected peak
    over: float  # largest share beyond a limit; feasible when <= 0; -1 without any limit
    reason: str  # which limit, with the numbers

    @property
    def fits(self) -> bool:
        return self.over <= 0


class Forecast:
    """Predicts candidates of one study, and learns from each that is measured.

    The correction is one factor on predicted sizes: the median of measured over predicted peaks; after an out-of-memory
    error that was not foreseen, at least what would have foreseen it.
    """

    def __init__(self, margin: float = 0.02, say: Callable[[str], None] = print) -> None:
        self.margin, self.say = margin, say
        self._measured: dict[int, float] = {}  # trial -> measured over predicted
        self._at_least = 0.0
        self._data: dict[str, DataSource] = {}
        self._known: dict[str, Prediction] = {}

    @property
    def ratio(self) -> float:
        """What predicted sizes are multiplied by."""
        median = statistics.median(self._measured.values()) if self._measured else 1.0
        return max(median, self._at_least)

    def judge(self, config: Config) -> Judgement:
        """Predict and compare. Raises what `predict` raises."""
        return self.judged(self.predicted(config), config)

    def predicted(self, config: Config) -> Prediction:
        key = fixed_id(config) + strategy_id(config)
        if key not in self._known:
            self._known[key] = predict(config, data=self.data_of(config.workload))
        return self._known[key]

    def data_of(self, conf: WorkloadConf) -> DataSource:
        key = digest([plain(conf.data)])
        if key not in self._data:
            self._data[key] = build_data(conf)
        return self._data[key]

    def judged(self, prediction: Prediction, config: Config) -> Judgement:
        ratio, cap = self.ratio, config.budget.memory_mib
        allocated = prediction.allocated_mib * ratio
        by = f" (predicted {mib(prediction.allocated_mib)}, corrected by {ratio:.3f})" if abs(ratio - 1) > 5e-4 else ""
        found = [(-1.0, "no limit is known")]
        if cap is not None:
            found.append((allocated / cap - 1, f"allocated peak {mib(allocated)}{by} of budget.memory_mib={cap:g}"))
        usable, needed = _capacity(config, prediction)
        if usable is not None and needed is not None:
            if prediction.fits:
                over, what = allocated / usable - 1, f"allocated peak {mib(allocated)}{by}"
            else:
                over = needed * ratio / usable - 1
                over = max(over, LEAST_OVER) if ratio >= 1 else over
                what = f"{mib(needed * ratio)} reserved{by}"
            found.append((over, f"{what} of the {mib(usable)} that device.capacity_mib leaves"))
        over, reason = max(found)
        return Judgement(prediction, allocated, over, reason)

    def learn(self, number: int, predicted_mib: float, measured_mib: float) -> None:
        """A trial's peak is known. Says so where it is further from the prediction than the margin."""
        if predicted_mib <= 0 or measured_mib <= 0 or number in self._measured:
            return
        off = measured_mib / predicted_mib / self.ratio - 1
        self._measured[number] = measured_mib / predicted_mib
        if abs(off) > self.margin:
            self.say(
                f"WARNING: prediction and measurement disagree: trial {number} was to take "
                f"{mib(measured_mib / (1 + off))} and took {mib(measured_mib)} ({percent(off, 1, sign=True)}, stated "
                f"margin {percent(self.margin, 1)}); predicted sizes are now multiplied by {self.ratio:.3f}"
            )

    def learn_out_of_memory(self, number: int, over: float) -> None:
        """A trial ran out of memory although its peak was predicted to be `over` (negative) beyond its limit."""
        if over > 0 or over <= -1:
            return
        self._at_least = max(self._at_least, self.ratio / (1 + over) * (1 + LEAST_OVER))
        self.say(
            f"WARNING: trial {number} was predicted to fit with {percent(-over, 1)} to spare and ran out of memory; "
            f"predicted sizes are now multiplied by {self.ratio:.3f}"
        )


def signature(judgement: Judgement, config: Config) -> str:
    """Equal for two candidates that are one computation: equal in all of the workload, device and measurement, and in
    all that the strategy does.

    With all other keys equal, a larger `min_tensor_kib` moves a part of what a smaller one
    moves: all of it, where the bytes are equal.
    """
    p, does = judgement.prediction, effective(config)
    does.pop("offload.min_tensor_kib", None)
    sizes = [round(v * MIB) for v in (p.allocated_mib, p.to_host_mib, p.from_host_mib)]
    return digest([fixed_id(config), does, sizes])


def _capacity(config: Config, prediction: Prediction) -> tuple[float | None, float | None]:
    """MiB that the device leaves to the allocator, and MiB that the strategy needs of them."""
    capacity = allocator_capacity(resolve_device(config.device))
    if capacity is None or prediction.headroom_mib is None:
        return None, None
    return capacity / MIB, capacity / MIB - prediction.headroom_mib
