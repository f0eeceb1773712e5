"""The memory ledger: every tensor storage from first appearance to end, with category, phase, operator and module.

    ledger = Ledger(capacity_bytes=None, device_type="cpu")
    with ledger, phases.listening(ledger):
        ledger.track(model, optimizer)      # parameters, buffers and optimizer state, by storage; names for the report
        run_step(...)                       # warm-up: the optimizer state comes into being
        ledger.reset_peak()
        run_step(...)
    peak = ledger.peak()                    # results.Peak: peak, phase, operator, module, what was alive there

It works on real CPU tensors, on hollow ones (sweep.memory.hollow_ledger) with the same numbers to the byte, with
`device_type="cuda"` on CUDA tensors, and on fake ones (torch's FakeTensorMode on the `cpu` device; enter that mode
first, the ledger inside), for which autograd itself allocates a little more. It changes nothing of what it watches.

What it sees: each storage that an operator returns for the first time while the ledger is entered, and what `track` is
given. Tensors made earlier and not tracked are not counted, nor are views or in-place results of them. Memory that a
kernel takes and gives back inside one operator is not visible (on a CPU it is not the device's; for CUDA see the
emulations). A storage's end is seen whenever it comes, between operators too. Bytes are the storage's, rounded up to
512.

Categories: `parameter`, `buffer` (tracked), `input` (allocated in the data phase), `activation` (allocated in a forward
phase and still there when the backward phase of its micro-step begins), `gradient` (held by a tracked parameter's .grad
when a backward phase ends), `optimizer_state` (held by the tracked optimizer when an optimizer phase ends), `temporary`
(all else), and beside the device `host`: what is allocated inside `with host_memory():`. Since some of these are known
only later, an allocation's category may change until `peak()` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from sweep.memory.accumulation import references_of_the_engine
from sweep.memory.host import host_memory
from sweep.memory.intercept import Intercept
from sweep.memory.ledger_log import Event
from sweep.memory.ledger_ops import Op
from sweep.memory.ledger_tensors import strided, tensors_in
from sweep.memory.ledger_watch import Watcher, Workspace
from sweep.results import Category, Peak, Phase

__all__ = ["Event", "Ledger", "host_memory"]


class Ledger(Watcher):
    """See the module's docstring. Also a listener of `sweep.step.Phases`.

    capacity_bytes: an allocation that would exceed it raises DeviceOutOfMemory and is not recorded. None: no limit.
    device_type: storages of this device type are the device's; on "cuda", CPU tensors count only inside `host_memory`.
    workspaces: what kernels of the emulated device take inside of an operator (sweep.memory.emulate), by overload.
    count_python_data: whether `torch.tensor(...)` counts; off where such tensors live on the host (emulated CUDA).
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        device_type: str = "cpu",
        workspaces: Mapping[Any, Workspace] | None = None,
        count_python_data: bool = True,
    ) -> None:
        super().__init__(capacity_bytes, device_type, workspaces, count_python_data)
        self._tracked: list[tuple[str, nn.Module]] = []  # with the prefix of its names
        self._optimizers: list[torch.optim.Optimizer] = []
        self._phases: list[str] = []
        self._entered = 0
        self._intercept = Intercept(self)

    # -- results -----------------------------------------------------------------------------------------------------

    def peak(self) -> Peak:
        """The highest point since the start or the last `reset_peak`, and what was alive there."""
        return self.log.report()

    @property
    def events(self) -> list[Event]:
        """Every allocation and end on the device so far, in order."""
        return list(self.log.events())

    def allocator_events(self) -> Iterator[tuple[Any, ...]]:
        """The same for sweep.memory.allocator.replay: ("malloc", id, bytes) and ("free", id)."""
        sizes = self.log.bytes
        for entry in self.log.order:
            yield ("malloc", entry, sizes[entry]) if entry >= 0 else ("free", ~entry)

    @property
    def in_use_bytes(self) -> int:
        return self.log.in_use

    @property
    def peak_bytes(self) -> int:
        return self.log.peak

    @property
    def host_in_use_bytes(self) -> int:
        return self.log.host_in_use

    @property
    def host_peak_bytes(self) -> int:
        return self.log.host_peak

    @property
    def operators(self) -> Iterable[Op]:
        """The operators that have run so far."""
        return self._ops.values()

    @property
    def in_backward(self) -> bool:
        """Whether a backward phase runs, recomputation included."""
        return self._in_backward

    def reset_peak(self) -> None:
        """Peaks (of phases and of the host, too) start again from what is in use now."""
        self.log.reset_peak()

    # -- what is tracked ---------------------------------------------------------------------------------------------

    def track(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, loss: nn.Module | None = None
    ) -> None:
        """Count the parameters and buffers of the model and of the loss (where it has any) and the optimizer's state,
        each storage once, and know their names.

        What is not known yet is taken to have come in the order of `model.to(device)`: inner modules first.
        """
        added = [("", model), *([] if loss is None else [("loss.", loss)])]
        self._tracked += added
        for prefix, module in added:
            for name, tensor, category in _in_order_of_to(module, prefix):
                self._claim(tensor, category, name)
            if self._entered:
                self._names.install(module, prefix)
        self._claim_gradients()
        if optimizer is not None:
            self._optimizers.append(optimizer)
            self._claim_state()

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((prefix + n, p) for prefix, module in self._tracked for n, p in module.named_parameters())

    def _claim(self, tensor: Tensor, category: Category, name: str) -> None:
        """Give a storage its category and name; count it if it is not known yet."""
        if tensor.layout is not torch.strided or not self._is_here(tensor):
            return
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None:
            id = known.id
            if self.log.category[id] in (Category.parameter, Category.buffer, Category.host):
                return
            self.log.category[id] = category
        elif (nbytes := storage.nbytes()) > 0:
            id = self._watch(storage, nbytes, category, "")
        else:
            return
        self.log.owner.setdefault(id, name)

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_type

    def _claim_gradients(self) -> None:
        for name, parameter in self._named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            for part in strided(gradient):
                self._claim(part, Category.gradient, name)

    def _claim_state(self) -> None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._named_parameters()}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for tensor in tensors_in(state):
                    self._claim(tensor, Category.optimizer_state, names.get(parameter, ""))

    # -- entering, leaving, modules ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._entered += 1
        if self._entered == 1:
            for prefix, module in self._tracked:
                self._names.install(module, prefix)
        references_of_the_engine()
        self._intercept.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._intercept.__exit__(*error)
        self._entered -= 1
        if not self._entered:
            self._names.remove()

    # -- phases ------------------------------------------------------------------------------------------------------

    def enter_phase(self, phase: str) -> None:
        if phase == Phase.forward and not self._phases:
            self._micro_step += 1
            self._modules.clear()
        elif phase == Phase.backward:
            self._keep_activations()
        self._phases.append(phase)
        self._switch()

    def leave_phase(self, phase: str) -> None:
        self._phases.pop()
        self._switch()
        if phase == Phase.backward:
            self._claim_gradients()
        elif phase == Phase.optimizer:
            self._micro_step = -1
            for name, parameter in self._named_parameters():  # an optimizer may have replaced their storages
                self._claim(parameter, Category.parameter, name)
            self._claim_state()

    def _switch(self) -> None:
        self._phase = self._phases[-1] if self._phases else ""
        self._in_data = self._phase == Phase.data
        self._in_backward = self._names.paused = Phase.backward in self._phases
        self._in_forward = Phase.forward in self._phases and not self._in_backward
        self.log.switch_phase(self._phase)

    def _keep_activations(self) -> None:
        log = self.log
        for id in list(log.alive):
            if log.forward[id] and log.micro_step[id] == self._micro_step and log.category[id] is Category.temporary:
                log.category[id] = Category.activation


def _in_order_of_to(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor, Category]]:
    for name, child in model.named_children():
        yield from _in_order_of_to(child, f"{prefix}{name}.")
    for name, parameter in model._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter, Category.parameter
    for name, buffer in model._buffers.items():
        if buffer is not None:
            yield prefix + name, buffer, Category.buffer
