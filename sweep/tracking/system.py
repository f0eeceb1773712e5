"""MLflow's own system metrics (CPU, memory, disk, network, GPU) of one run; imports MLflow, so imported only in use."""

from __future__ import annotations

import contextlib

import psutil
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

INTERVAL_S = 1.0
SAMPLES_AT_ONCE = 60  # so that a long trial can be watched


class SystemSampler(SystemMetricsMonitor):  # type: ignore[misc]
    """MLflow's monitor asks the store for the run's state at every sample, which would disturb the steps being timed.

    This one keeps what it reads, and writes it once a minute and at the end. What fails ends the sampling alone.
    """

    def __init__(self, uri: str, run_id: str, interval_s: float = INTERVAL_S) -> None:
        super().__init__(run_id, interval_s, SAMPLES_AT_ONCE, tracking_uri=uri)
        self.mlflow_logger._should_flush = bool  # type: ignore[method-assign]  # False: it is told when to write
        psutil.cpu_percent()  # the first call has nothing to compare with and says 0

    def monitor(self) -> None:
        with contextlib.suppress(Exception):  # drivers and containers fail in many ways, and none may end a trial
            while not self._shutdown_event.wait(self.sampling_interval):
                self.sample()
                if self._logging_step % self.samples_before_logging == 0:
                    self.mlflow_logger.flush()

    def sample(self) -> None:
        self.collect_metrics()
        self.publish_metrics(self.aggregate_metrics())

    def finish(self) -> None:
        """End the sampling and write what is left. A trial shorter than the interval has one sample."""
        self._shutdown_event.set()
        if self._process is not None:
            self._process.join(timeout=10 * self.sampling_interval)
            for action in () if self._process.is_alive() else (self.sample, self.mlflow_logger.flush):
                with contextlib.suppress(Exception):
                    action()
            self._process = None
