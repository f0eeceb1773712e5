"""Device profiles: what is known of a card without having it. A profile is a file of conf/device/.

What torch says of the card that is here, and what `auto` becomes, is sweep.memory.device's to find.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import metadata

import yaml

from sweep.config.schema import DeviceConf
from sweep.environment import CONF
from sweep.errors import BadInput
from sweep.results import MIB

PROFILES = CONF / "device"
#: cuBLAS's workspace (parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp): two chunks of 4096 KiB and
#: eight of 16 KiB (":4096:2:16:8"); 32 MiB on Hopper and, since torch 2.12, on Blackwell (majors 10, 11 and 12).
CUBLAS_WORKSPACE_MIB = 8.125
CUBLAS_WORKSPACE_LARGE_MIB = 32.0
BLACKWELL_LARGE_SINCE = (2, 12)
#: From this torch on, a workspace is taken for each product of matrices and not kept (pytorch#194311).
CUBLAS_WORKSPACE_PER_CALL_SINCE = (2, 14)
#: A max_split_size_mb of up to this (kLargeBuffer, the segment of smaller requests) is an error in torch, too.
LEAST_MAX_SPLIT_MIB = 20
#: What driver, context and loaded kernels take per multiprocessor, where no message of that card is public. Median of
#: the cards in conf/device/ that have one: T4 3.4, L4 4.1, A10 3.1, A100 4.6 and 3.8, A800 4.8, RTX 4090 3.7, 5090 3.6.
CONTEXT_MIB_PER_MULTIPROCESSOR = 3.6


@dataclass(frozen=True)
class AllocatorOptions:
    """The part of PYTORCH_CUDA_ALLOC_CONF that changes where blocks go."""

    max_split_size: int | None = None  # bytes; blocks from this size on are never cut
    expandable_segments: bool = False

    @classmethod
    def parse(cls, text: str, key: str = "PYTORCH_CUDA_ALLOC_CONF") -> AllocatorOptions:
        """Read PYTORCH_CUDA_ALLOC_CONF's own syntax, such as "expandable_segments:True,max_split_size_mb:128".

        `key` names the setting in the BadInput that an option without a replay raises.
        """
        split: int | None = None
        expandable = False
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = (p.strip() for p in part.partition(":"))
            if name == "max_split_size_mb" and value.isdigit():
                split = int(value) * MIB
                if int(value) <= LEAST_MAX_SPLIT_MIB:
                    todo = f"give more than {LEAST_MAX_SPLIT_MIB}"
                    raise BadInput(key, text, "max_split_size_mb is too small", todo)
            elif name == "expandable_segments" and value.lower() in ("true", "false"):
                expandable = value.lower() == "true"
            else:
                todo = "use max_split_size_mb:N and expandable_segments:True|False"
                raise BadInput(key, text, f"{part} cannot be replayed", todo)
        return cls(split, expandable)


def completed(conf: DeviceConf) -> DeviceConf:
    """A CUDA device with what follows by rule filled in; values that were given stay."""
    alloc_conf = conf.alloc_conf or environment_alloc_conf()[0]
    return replace(conf, cublas_workspace_mib=cublas_workspace_mib(conf), alloc_conf=alloc_conf)


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
    fitting = [c for c in cards if c.torch_name is not None and is_card(c, torch_name, capability, total_mib)]
    return min(fitting, key=lambda c: abs((c.capacity_mib or 0.0) - total_mib), default=None)


def is_card(conf: DeviceConf, torch_name: str, capability: str, total_mib: float) -> bool:
    """Name, architecture and memory agree; drivers differ by up to 3 % in the memory that they show."""
    names = torch_name == conf.torch_name or fnmatchcase(torch_name, conf.torch_name or "")
    same_architecture = conf.compute_capability in (None, capability)
    enough = conf.capacity_mib is None or total_mib >= 0.97 * conf.capacity_mib
    return names and same_architecture and enough
