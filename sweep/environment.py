"""What a run was made with: the project's commit, this machine and its packages. No MLflow, no torch."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path


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


GIT_WAIT_S = 10.0


@functools.lru_cache(maxsize=8)
def git_state(folder: Path) -> tuple[str, bool]:
    """The commit that `folder` is at, and whether tracked files differ from it; ("", False) where there is no git."""
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # only looking: no other git command has to wait for us
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=GIT_WAIT_S, env=quiet)
    except (OSError, subprocess.TimeoutExpired):
        return "", False
    lines = done.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if done.returncode != 0 or not commit.isalnum():  # "(initial)": no commit yet
        return "", False
    return commit, any(not line.startswith("#") for line in lines)


@functools.lru_cache(maxsize=1)
def packages() -> tuple[str, ...]:
    """Installed packages as pip would pin them, in order of name."""
    found = {f"{dist.name}=={dist.version}" for dist in metadata.distributions() if dist.metadata["Name"]}
    return tuple(sorted(found, key=str.lower))


@functools.lru_cache(maxsize=1)
def machine_facts() -> dict[str, str]:
    """Python, platform, processors, memory, torch's version and NVIDIA's driver and GPUs, where there are any."""
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": str(os.cpu_count()),
    }
    for name in ("torch", "mlflow", "hydra-core", "optuna"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    with contextlib.suppress(Exception):
        import psutil

        facts["host_memory_mib"] = str(psutil.virtual_memory().total // 2**20)
    with contextlib.suppress(Exception):  # no driver, or no GPU behind it
        import pynvml

        pynvml.nvmlInit()
        facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        facts["gpus"] = ", ".join(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    return facts
