"""What a result was obtained with: versions, device and driver. No torch is imported that was not there before."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from importlib import metadata


@cache
def environment() -> dict[str, str]:
    """Versions and machine, as strings. GPU entries only where there is one."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": str(os.cpu_count()),
    }
    for package in ("torch", "numpy", "hydra-core", "optuna", "mlflow", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch_threads"] = str(torch.get_num_threads())
        if torch.cuda.is_available():
            found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(), "driver": _driver()}
    return found


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return "unknown"
    return version.decode() if isinstance(version, bytes) else str(version)
