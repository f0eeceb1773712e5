"""The device: the one that is here, as torch knows it, and what a model is told of one that is emulated on CPU tensors.

Tensors, factories and torch.cuda answer as on the device that is predicted for, so that `x.is_cuda`, `device=x.device`,
`torch.cuda.is_available()` or `torch.autocast("cuda")` take the branch that will run there. The rest of torch and this
program's own code see the same answers: optimizers, clipping and checkpointing do what they do on CUDA.

Below Python there are only CPU tensors, so which side a tensor is on is the ledger's to know (HollowLedger.on_device):
parameters, buffers, and what is computed from tensors of the device or asked for on it are there; tensors made from
lists, numpy or without a device, and copies such as `.cpu()`, are on the host.

What cannot be answered ends the prediction with a line (CannotPredict), or is said of it (`caveats`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from sweep.config.device import CONTEXT_MIB_PER_MULTIPROCESSOR, completed, find_profile, is_card
from sweep.config.schema import DeviceConf
from sweep.errors import BadInput, CannotPredict
from sweep.memory.hollow import CPU, HollowLedger
from sweep.memory.ledger import host_memory
from sweep.memory.operators import replaced
from sweep.results import MIB

_NVTX = {"range_push": lambda *_: 0, "range_pop": lambda: 0, "mark": lambda *_: None, "range": nullcontext}
_raw_device = Tensor.device.__get__
_raw_to = Tensor.to
#: Made from data, not from sizes: they are on the host first, wherever they are asked for.
_FROM_DATA = ("tensor", "as_tensor", "asarray", "scalar_tensor")


def resolve_device(conf: DeviceConf) -> DeviceConf:
    """The device with everything filled in that can be known; values that were given stay. `auto` becomes what is here.

    Raises BadInput for `device=auto device.type=cuda` on a machine without one, and for an index that does not exist.
    """
    if conf.type == "cuda" and conf.name != "auto":  # a profile: it need not be here
        return completed(conf)
    if conf.type == "cpu":
        return conf
    if not torch.cuda.is_available():
        if conf.type == "cuda":
            todo = "use device=cpu, or a profile with mode=predict"
            raise BadInput("device.type", "cuda", "this machine has no CUDA device", todo)
        return replace(conf, type="cpu", name="cpu")
    count = torch.cuda.device_count()
    if conf.index >= count:
        raise BadInput("device.index", conf.index, f"this machine has {count} CUDA device(s)", f"give 0 to {count - 1}")
    torch_name, capability, total_mib, multiprocessors = _card(conf.index)
    seen: dict[str, Any] = {
        "capacity_mib": total_mib,
        "compute_capability": capability,
        "torch_name": torch_name,
        "context_mib": round(CONTEXT_MIB_PER_MULTIPROCESSOR * multiprocessors),
        "multiprocessors": multiprocessors,
        "source": "torch.cuda.get_device_properties",
    }
    known = find_profile(torch_name, capability, total_mib)
    if known is not None:
        from_profile = ("context_mib", "memory_bandwidth_gb_s", "link_bandwidth_gb_s", "peak_tflops", "source")
        seen |= {name: getattr(known, name) for name in from_profile}
    default = DeviceConf()
    missing = {n: v for n, v in seen.items() if getattr(conf, n) == getattr(default, n)}
    return completed(replace(conf, type="cuda", name=torch_name if known is None else known.name, **missing))


def machine_has(conf: DeviceConf) -> bool:
    """Whether trials can be measured on this device here and now."""
    if conf.type == "cpu":
        return True
    if not torch.cuda.is_available():
        return conf.type == "auto"
    if conf.index >= torch.cuda.device_count():
        return False
    return conf.torch_name is None or is_card(conf, *_card(conf.index)[:3])


def _card(index: int) -> tuple[str, str, float, int]:
    """Name, compute capability, memory in MiB and multiprocessors of a card that is here."""
    found = torch.cuda.get_device_properties(index)
    capability = f"{found.major}.{found.minor}"
    return found.name, capability, found.total_memory / MIB, found.multi_processor_count


class CudaAnswers:
    """The answers of one emulated device; `installed` puts them in place of torch's own, for all threads."""

    def __init__(self, conf: DeviceConf, capability: tuple[int, int], ledger: HollowLedger) -> None:
        self.conf, self.capability, self.ledger = conf, capability, ledger
        self.device = torch.device("cuda", conf.index)
        self.caveats: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, answers in (
                (Tensor, self._of_tensors()),
                (torch, {**self._of_factories(), **_autocast_state()}),
                (torch.cuda, self._of_cuda()),
                (torch.cuda.nvtx, _NVTX),
                (torch.accelerator, self._of_the_accelerator()),
                (torch._C, {"_group_tensors_by_device_and_dtype": self._grouped}),
            ):
                for name, answer in answers.items():
                    stack.enter_context(replaced(owner, name, answer))
            # CUDA's own default, in the CPU's place.
            stack.callback(torch._C.set_autocast_dtype, "cpu", torch._C.get_autocast_dtype("cpu"))
            torch._C.set_autocast_dtype("cpu", torch._C.get_autocast_dtype("cuda"))
            self.ledger.sides = True
            stack.callback(setattr, self.ledger, "sides", False)
            yield

    def _say(self, caveat: str) -> None:
        if caveat not in self.caveats:
            self.caveats.append(caveat)

    # -- tensors -----------------------------------------------------------------------------------------------------

    def _of_tensors(self) -> dict[str, Any]:
        on_device, cuda = self.ledger.on_device, self.device

        def device(tensor: Tensor) -> torch.device:
            raw = _raw_device(tensor)
            return cuda if raw.type == "cpu" and on_device(tensor) else raw

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args and isinstance(args[0], torch.dtype):
                kwargs |= zip(("dtype", "non_blocking", "copy"), args, strict=False)
            elif args and isinstance(args[0], Tensor):
                kwargs |= {"device": args[0].device, "dtype": args[0].dtype}
                kwargs |= zip(("non_blocking", "copy"), args[1:], strict=False)
            elif args:
                rest = ("dtype", "non_blocking", "copy")
                names = rest if len(args) > 1 and isinstance(args[1], (torch.dtype, type(None))) else rest[1:]
                kwargs |= {"device": args[0], **dict(zip(names, args[1:], strict=False))}
            asked = kwargs.pop("device", None)
            if asked is None:
                return _raw_to(tensor, **kwargs)
            wanted = _device(asked)
            if wanted.type not in ("cpu", "cuda"):
                return _raw_to(tensor, wanted, **kwargs)
            if (wanted.type == "cuda") is on_device(tensor):
                return _raw_to(tensor, CPU, **kwargs)
            return self._moved(tensor, wanted.type == "cuda", kwargs)

        def as_on(kind: str) -> Callable[..., Tensor]:
            return lambda tensor, *_, **kwargs: to(tensor, kind, **kwargs)

        return {
            "device": property(device),
            "is_cuda": property(lambda tensor: device(tensor).type == "cuda"),
            "is_cpu": property(lambda tensor: device(tensor).type == "cpu"),
            "get_device": lambda tensor: cuda.index if device(tensor).type == "cuda" else -1,
            "to": to,
            "cuda": lambda tensor, device=None, **kwargs: to(tensor, "cuda", **kwargs),
            "cpu": lambda tensor, **kwargs: to(tensor, "cpu", **kwargs),
            "pin_memory": lambda tensor, device=None: tensor.clone(),
            "is_pinned": lambda tensor, device=None: False,
            "record_stream": _nothing,
            "new_tensor": lambda tensor, data, **kwargs: torch.tensor(data, **{"device": tensor.device, **kwargs}),
        }

    def _moved(self, tensor: Tensor, to_device: bool, kwargs: dict[str, Any]) -> Tensor:
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _raw_to(_Moved.apply(tensor, self.ledger, to_device), **{**kwargs, "copy": False})
        dtype = kwargs.get("dtype") or tensor.dtype
        layout = kwargs.get("memory_format") or torch.preserve_format
        with self.ledger.forced(to_device):
            return _raw_to(tensor, dtype=dtype, copy=True, memory_format=layout)

    # -- factories ---------------------------------------------------------------------------------------------------

    def _of_factories(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for original in _device_constructors():
            name = getattr(original, "__name__", "")
            if getattr(torch, name, None) is original:
                found[name] = original
        made = {n: self._from_data(f) if n in _FROM_DATA else self._factory(f) for n, f in found.items()}
        return {**made, "as_tensor": self._from_data(torch.as_tensor), "asarray": self._from_data(torch.asarray)}

    def _factory(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            kwargs.pop("pin_memory", None)
            if device is not None:
                kind = _device(device).type
                if kind not in ("cpu", "cuda"):
                    return original(*args, device=device, **kwargs)
                with self.ledger.forced(kind == "cuda"):
                    return original(*args, **kwargs)
            # A default device is a mode, which gives it to the original; `like` something is where that is.
            if torch._C._len_torch_function_stack() or (args and isinstance(args[0], Tensor)):
                return original(*args, **kwargs)
            with host_memory():
                return original(*args, **kwargs)

        return make

    def _from_data(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
            kwargs.pop("pin_memory", None)
            if isinstance(data, Tensor) and device is None:
                return original(data, *args, **kwargs).requires_grad_(requires_grad or data.requires_grad)
            if device is None:
                modes = [m for m in _get_current_function_mode_stack() if isinstance(m, DeviceContext)]
                device = modes[-1].device if modes else None
            made = original(data, *args, device=CPU, **kwargs)
            if device is not None:
                made = made.to(device)
            return made.requires_grad_() if requires_grad else made

        return make

    # -- torch.cuda --------------------------------------------------------------------------------------------------

    def _of_cuda(self) -> dict[str, Any]:
        conf, ledger, index = self.conf, self.ledger, self.device.index
        total = round((conf.capacity_mib or 0.0) * MIB)
        name = (conf.torch_name or conf.name).replace("*", " ").strip()
        major, minor = self.capability
        shown = {"name": name, "major": major, "minor": minor, "total_memory": total, "warp_size": 32}
        properties = SimpleNamespace(**shown, multi_processor_count=conf.multiprocessors or 0)
        in_use, peak = (lambda *_: ledger.log.in_use), (lambda *_: ledger.log.peak)

        def empty_cache() -> None:
            self._say("the model empties the allocator's cache, which is not replayed")

        def refused(called: str) -> Callable[..., Any]:
            def refuse(*_: Any, **__: Any) -> Any:
                raise CannotPredict(f"the model calls torch.cuda.{called}, which has no answer without the device")

            return refuse

        nothing = (
            *("init", "_lazy_init", "synchronize", "set_device", "manual_seed", "manual_seed_all", "seed", "seed_all"),
            *("set_rng_state", "set_rng_state_all", "reset_peak_memory_stats", "reset_max_memory_allocated"),
            *("reset_max_memory_cached", "reset_accumulated_memory_stats", "ipc_collect", "set_stream"),
            "set_per_process_memory_fraction",
        )
        answers: dict[str, Any] = {
            **dict.fromkeys(nothing, _nothing),
            **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), in_use),
            **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), peak),
            **dict.fromkeys(("device", "device_of", "stream"), lambda *_, **__: nullcontext()),
            **dict.fromkeys(("Stream", "ExternalStream", "Event"), _Stream),
            **dict.fromkeys(("current_stream", "default_stream"), lambda *_: _Stream()),
            **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
            "is_current_stream_capturing": lambda: False,
            "device_count": lambda: index + 1,
            "current_device": lambda: index,
            "get_device_capability": lambda *_: self.capability,
            "get_device_name": lambda *_: name,
            "get_device_properties": lambda *_: properties,
            "get_arch_list": lambda: ["sm_{}{}".format(*self.capability)],
            "is_bf16_supported": lambda including_emulation=True: including_emulation or self.capability >= (8, 0),
            "is_tf32_supported": lambda: self.capability >= (8, 0),
            "mem_get_info": lambda *_: (max(0, total - ledger.log.in_use), total),
            "empty_cache": empty_cache,
            "initial_seed": torch.initial_seed,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "get_rng_state_all": lambda: [torch.get_rng_state()],
        }
        asked = [n for n in torch.cuda.__all__ if _is_function(getattr(torch.cuda, n, None)) and n not in answers]
        return {**{n: refused(n) for n in asked}, **answers}

    def _of_the_accelerator(self) -> dict[str, Any]:
        return {
            "is_available": lambda: True,
            "current_accelerator": lambda *_, **__: self.device,
            "device_count": lambda: self.device.index + 1,
            "current_device_index": lambda: self.device.index,
            "current_stream": lambda *_: _Stream(),
            "synchronize": _nothing,
        }

    def _grouped(self, *args: Any) -> Any:
        """torch's grouping of an optimizer's tensors, which is made in C++, with the device as Python sees it."""
        grouped = _raw_grouped(*args)
        return {(self.device if device.type == "cpu" else device, dtype): v for (device, dtype), v in grouped.items()}


_raw_grouped = torch._C._group_tensors_by_device_and_dtype


class _Moved(torch.autograd.Function):
    """A copy on the other side, whose gradient comes back to this one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ledger: HollowLedger, to_device: bool) -> Tensor:
        ctx.ledger, ctx.to_device = ledger, to_device
        with ledger.forced(to_device):
            return _raw_to(tensor, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        with ctx.ledger.forced(not ctx.to_device):
            return _raw_to(gradients[0], copy=True), None, None


class _Stream:
    """Streams and events: everything is in order, and nothing takes time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = self.stream_id = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, end: object) -> float:
        return 0.0

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = wait = record = synchronize = wait_stream


def _autocast_state() -> dict[str, Any]:
    """Autocast's state of the device "cuda" is the CPU's, where CudaAutocast has the operators' rules."""
    c = torch._C

    def here(kind: str) -> str:
        return "cpu" if kind == "cuda" else kind

    return {
        "is_autocast_enabled": lambda kind="cuda": c.is_autocast_enabled(here(kind)),
        "set_autocast_enabled": lambda *a: c.set_autocast_enabled(here(a[0]) if len(a) > 1 else "cpu", a[-1]),
        "get_autocast_dtype": lambda kind: c.get_autocast_dtype(here(kind)),
        "set_autocast_dtype": lambda kind, dtype: c.set_autocast_dtype(here(kind), dtype),
        "get_autocast_gpu_dtype": lambda: c.get_autocast_dtype("cpu"),
        "set_autocast_gpu_dtype": lambda dtype: c.set_autocast_dtype("cpu", dtype),
    }


def _device(asked: Any) -> torch.device:
    return torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _nothing(*_: Any, **__: Any) -> None:
    pass
