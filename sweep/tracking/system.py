"""MLflow's own system metrics (CPU, memory, disk, network, GPU) for one run, sampled while a trial runs.

MLflow's SystemMetricsMonitor asks the store for the run's state and writes to it at every sample, which would disturb
the steps being timed. Here the same monitors are read, and what they say is kept in memory and written rarely.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
WRITE_EVERY_S = 60.0  # so that a long trial can be watched


class SystemSampler:
    """Reads MLflow's monitors every `interval_s` seconds in a thread, and once more at the end.

    write: called with the samples that have come together, from the thread or from `stop`; what it raises ends the
    sampling and nothing else.
    """

    def __init__(self, write: Callable[[list[Metric]], object], interval_s: float = INTERVAL_S) -> None:
        self.interval_s = interval_s
        self._write = write
        self._monitors = _monitors()
        self._samples: list[Metric] = []
        self._step = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)

    def start(self) -> None:
        import psutil

        psutil.cpu_percent()  # the first call has nothing to compare with and says 0
        self._thread.start()

    def stop(self) -> None:
        """End the sampling and write what is left. A trial shorter than the interval has one sample."""
        self._stop.set()
        self._thread.join(timeout=10 * self.interval_s)
        if not self._thread.is_alive():
            self._guarded(self._sample)
            self._guarded(self._flush)

    def _run(self) -> None:
        written = time.monotonic()
        while not self._stop.wait(self.interval_s):
            if not self._guarded(self._sample):
                return
            if time.monotonic() - written > WRITE_EVERY_S:
                written = time.monotonic()
                if not self._guarded(self._flush):
                    return

    def _sample(self) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        for monitor in self._monitors:
            monitor.collect_metrics()
            for name, value in monitor.aggregate_metrics().items():
                self._samples.append(Metric(f"system/{name}", float(value), now_ms, self._step))
            monitor.clear_metrics()
        self._step += 1

    def _flush(self) -> None:
        samples, self._samples = self._samples, []
        if samples:
            self._write(samples)

    def _guarded(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # drivers and containers fail in many ways, and none may end a trial
            log.debug("system metrics stopped: %s", error)
            return False
        return True


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    found: list[Any] = []
    for kind in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        with contextlib.suppress(Exception):  # no GPU, or /proc is not what psutil expects
            found.append(kind())
    return found
