"""Device profiles: what is known of a card without having it, and what torch says of the one that is here.

A profile is a file of conf/device/. `resolve_device` fills in the rest: for `auto` from torch (and from the profile of
the card that was found, where there is one), for anything else by rule. torch is imported only when it is asked.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from sweep.config.schema import DeviceConf
from sweep.errors import BadInput
from sweep.memory.allocator import AllocatorOptions

MIB = 2**20
PROFILES = Path(__file__).resolve().parents[2] / "conf" / "device"
#: cuBLAS's workspace (parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp): two chunks of 4096 KiB and
#: eight of 16 KiB (":4096:2:16:8"); 32 MiB on Hopper and, since torch 2.12, on Blackwell (majors 10, 11 and 12).
CUBLAS_WORKSPACE_MIB = 8.125
CUBLAS_WORKSPACE_LARGE_MIB = 32.0
BLACKWELL_LARGE_SINCE = (2, 12)
#: From this torch on, a workspace is taken for each product of matrices and not kept (pytorch#194311).
CUBLAS_WORKSPACE_PER_CALL_SINCE = (2, 14)
#: What driver, context and loaded kernels take per multiprocessor, where no message of that card is public. Median of
#: the cards in conf/device/ that have one: T4 3.4, L4 4.1, A10 3.1, A100 4.6 and 3.8, A800 4.8, RTX 4090 3.7, 5090 3.6.
CONTEXT_MIB_PER_MULTIPROCESSOR = 3.6


def resolve_device(conf: DeviceConf) -> DeviceConf:
    """The device with everything filled in that can be known; values that were given stay. `auto` becomes what is here.

    Raises BadInput for `device=auto device.type=cuda` on a machine without one, and for an index that does not exist.
    """
    if conf.type == "cuda" and conf.name != "auto":  # a profile: it need not be here
        return _by_rule(conf)
    if conf.type == "cpu":
        return conf
    import torch

    if not torch.cuda.is_available():
        if conf.type == "cuda":
            todo = "use device=cpu, or a profile with mode=predict"
            raise BadInput("device.type", "cuda", "this machine has no CUDA device", todo)
        return replace(conf, type="cpu", name="cpu")
    count = torch.cuda.device_count()
    if conf.index >= count:
        raise BadInput("device.index", conf.index, f"this machine has {count} CUDA device(s)", f"give 0 to {count - 1}")
    properties = torch.cuda.get_device_properties(conf.index)
    capability = f"{properties.major}.{properties.minor}"
    total_mib = properties.total_memory / MIB
    seen: dict[str, Any] = {
        "capacity_mib": total_mib,
        "compute_capability": capability,
        "torch_name": properties.name,
        "context_mib": round(CONTEXT_MIB_PER_MULTIPROCESSOR * properties.multi_processor_count),
        "multiprocessors": properties.multi_processor_count,
        "source": "torch.cuda.get_device_properties",
    }
    known = find_profile(properties.name, capability, total_mib)
    if known is not None:
        from_profile = ("context_mib", "memory_bandwidth_gb_s", "link_bandwidth_gb_s", "peak_tflops", "source")
        seen |= {name: getattr(known, name) for name in from_profile}
    default = DeviceConf()
    missing = {n: v for n, v in seen.items() if getattr(conf, n) == getattr(default, n)}
    name = properties.name if known is None else known.name
    return _by_rule(replace(conf, type="cuda", name=name, **missing))


def _by_rule(conf: DeviceConf) -> DeviceConf:
    return replace(
        conf,
        cublas_workspace_mib=cublas_workspace_mib(conf),
        alloc_conf=conf.alloc_conf or environment_alloc_conf()[0],
    )


def environment_alloc_conf() -> tuple[str, str]:
    """What this process's PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) says that can be replayed, and the rest."""
    known, rest = [], []
    for part in (os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "").split(","):
        try:
            AllocatorOptions.parse(part)
            known.append(part)
        except BadInput:
            rest.append(part)
    return ",".join(filter(None, known)), ",".join(rest)


def cublas_workspace_mib(conf: DeviceConf, torch_version: str = "") -> float:
    """cuBLAS's workspace per handle and stream, counted in torch's allocated memory. 0 off CUDA.

    torch_version: such as "2.11.0", whose rule holds; "": that of the torch that is installed.
    """
    if conf.cublas_workspace_mib is not None:
        return conf.cublas_workspace_mib
    if conf.compute_capability is None:
        return 0.0
    chunks = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if chunks:
        return sum(int(kib) * int(count) for kib, count in chunks) / 1024
    major = int(str(conf.compute_capability).split(".")[0])
    large = major == 9 or (major in (10, 11, 12) and torch_release(torch_version) >= BLACKWELL_LARGE_SINCE)
    return CUBLAS_WORKSPACE_LARGE_MIB if large else CUBLAS_WORKSPACE_MIB


def cublas_workspace_kept(torch_version: str = "") -> bool:
    """Whether a workspace stays once it has been taken. torch_version: as above."""
    return torch_release(torch_version) < CUBLAS_WORKSPACE_PER_CALL_SINCE


def torch_release(version: str = "") -> tuple[int, int]:
    """(2, 13) of "2.13.0+cu128"; "": of the torch that is installed."""
    major, minor = (version or metadata.version("torch")).split(".")[:2]
    return int(major), int(minor)


def allocator_capacity(conf: DeviceConf) -> int | None:
    """Bytes that torch's allocator may reserve: the card less driver and context. None: unknown."""
    if conf.capacity_mib is None:
        return None
    return max(0, int((conf.capacity_mib - (conf.context_mib or 0.0)) * MIB))


def profile_names() -> list[str]:
    """The profiles of conf/device/, `auto` and `cpu` included."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_profile(name: str) -> DeviceConf:
    """One profile of conf/device/ by name, unresolved. Raises BadInput for a name that has none."""
    path = PROFILES / f"{name}.yaml"
    if not path.is_file():
        raise BadInput("device", name, "is no device profile", f"give one of {', '.join(profile_names())}")
    return DeviceConf(**yaml.safe_load(path.read_text(encoding="utf-8")))


def find_profile(torch_name: str, capability: str, total_mib: float) -> DeviceConf | None:
    """The profile of the card that torch calls `torch_name`; of several (24 and 48 GB), the one nearest in memory."""
    cards = [load_profile(name) for name in profile_names()]
    fitting = [c for c in cards if c.torch_name is not None and _is_card(c, torch_name, capability, total_mib)]
    return min(fitting, key=lambda c: abs((c.capacity_mib or 0.0) - total_mib), default=None)


def machine_has(conf: DeviceConf) -> bool:
    """Whether trials can be measured on this device here and now."""
    if conf.type == "cpu":
        return True
    import torch

    if not torch.cuda.is_available():
        return conf.type == "auto"
    if conf.index >= torch.cuda.device_count():
        return False
    if conf.torch_name is None:
        return True
    found = torch.cuda.get_device_properties(conf.index)
    return _is_card(conf, found.name, f"{found.major}.{found.minor}", found.total_memory / MIB)


def _is_card(conf: DeviceConf, torch_name: str, capability: str, total_mib: float) -> bool:
    """Name, architecture and memory agree; drivers differ by up to 3 % in the memory that they show."""
    names = torch_name == conf.torch_name or fnmatchcase(torch_name, conf.torch_name or "")
    same_architecture = conf.compute_capability in (None, capability)
    enough = conf.capacity_mib is None or total_mib >= 0.97 * conf.capacity_mib
    return names and same_architecture and enough
