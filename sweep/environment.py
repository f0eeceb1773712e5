"""Where the program is and what a run was made with: folders, command, commit, machine, packages, process.

Imports neither torch nor MLflow.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import psutil

GIT_WAIT_S = 10.0
PACKAGE = Path(__file__).resolve().parent
#: The folder of train.py where the program runs from a checkout; None: it was installed from a wheel.
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "train.py").is_file() else None
#: The config groups.
CONF = PACKAGE / "conf" if CHECKOUT is None else CHECKOUT / "conf"
#: Hydra's flags that say where configs are, in their two spellings each.
_WHERE = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")


def home() -> Path:
    """Where mlruns/ lies: the checkout, else the working directory."""
    return CHECKOUT or Path.cwd()


def program() -> list[str]:
    """The words that this command began with, to be typed again: an import path that was given and matters, the
    program, and Hydra's flags that say where configs are. Words follow."""
    called, given = Path(sys.argv[0]), sys.argv[1:]
    words = ["memory-sweep"] if called.name == "memory-sweep" else ["python", "train.py"]
    if called.name == "train.py" and called.resolve().parent != Path.cwd():
        words[1] = sys.argv[0]
    path = os.environ.get("PYTHONPATH", "")
    theirs = [p for p in path.split(os.pathsep) if p and Path(p).resolve() != CHECKOUT]
    kept: list[str] = []
    for i, word in enumerate(given):
        flag, equals, _ = word.partition("=")
        if flag in _WHERE:
            kept += [word] if equals else given[i : i + 2]
    # Without a config folder of one's own nothing of one's own is imported, or it is named by its own path.
    if theirs and (kept or any("_target_=" in word for word in given)):
        words.insert(0, f"PYTHONPATH={os.pathsep.join(theirs)}")
    return [*words, *kept]


@cache
def environment() -> dict[str, str]:
    """Versions and machine, as strings. NVIDIA's driver and GPUs only where there are some."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": str(os.cpu_count()),
        "host_memory_mib": str(psutil.virtual_memory().total // 2**20),
    }
    for package in ("torch", "numpy", "hydra-core", "optuna", "mlflow", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch_threads"] = str(torch.get_num_threads())
        if torch.cuda.is_available():
            found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    with suppress(Exception):  # no driver, or no GPU behind it
        import pynvml

        pynvml.nvmlInit()
        found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found["gpus"] = ", ".join(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    return found


@cache
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


@cache
def packages() -> tuple[str, ...]:
    """Installed packages as pip would pin them, in order of name."""
    found = {f"{dist.name}=={dist.version}" for dist in metadata.distributions() if dist.metadata["Name"]}
    return tuple(sorted(found, key=str.lower))


def own_process() -> str:
    """This process as host:number:start, recognisable after a reboot and when its number has become another's."""
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def has_ended(process: str) -> bool:
    """Whether the process of that name (see `own_process`) is gone. One on another host, or of no such name, is not."""
    try:
        host, number, started = process.rsplit(":", 2)
        if host != socket.gethostname():
            return False
        found = psutil.Process(int(number))
        return found.status() == psutil.STATUS_ZOMBIE or abs(found.create_time() - float(started)) > 1.0
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError):
        return False
