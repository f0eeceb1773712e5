"""The ledger's event log: what was allocated and freed in which order, and the report of the peak made from it.

An allocation is a number, `id`, counted from 0; lists indexed by it hold what is known of it. What an allocation was
for is often known only later (a tensor is an activation once the backward pass begins and it is still there), so the
category of an id may change until the report is made. Order is kept as one list of integers: `id` for an allocation,
`~id` for its end. Recording costs well under a microsecond; everything else waits for the report.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from sweep.results import MIB, Category, Holder, Peak

#: What CUDA's caching allocator rounds to (kMinBlockSize); the ledger counts alike on every device.
BLOCK_BYTES = 512
#: Holders that a report names.
LARGEST = 10
#: Sequence number of graph nodes that no forward operator made (AccumulateGrad).
NO_NODE = -1


def round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Event:
    """One allocation or its end, in the order of occurrence. Device memory only."""

    kind: str  # "malloc" | "free"
    id: int
    bytes: int  # rounded up to 512
    phase: str  # phase of the allocation, "" outside of any
    operator: str  # such as aten.mm
    module: str  # qualified name, "" outside of any
    category: str
    micro_step: int  # counted from 0 within an optimizer step, -1 outside


class Log:
    """Allocations, in-use bytes and peaks, for the device and for host copies beside it. Sizes are bytes."""

    def __init__(self) -> None:
        self.order: list[int] = []  # device: id, and ~id when it ends
        self.bytes: list[int] = []
        self.category: list[Category] = []
        self.phase: list[str] = []
        self.operator: list[str] = []
        self.module: list[str] = []
        self.node: list[int] = []  # sequence number of the graph node that was running backward
        self.micro_step: list[int] = []
        self.forward: list[bool] = []  # allocated in a forward phase, and not by recomputation
        self.owner: dict[int, str] = {}  # parameter name, where the id belongs to one
        self.alive: dict[int, int] = {}  # device id -> bytes
        self.in_use = self.peak = 0
        self.peak_at = 0  # length of `order` when the peak was reached
        self.peak_id: int | None = None  # whose allocation made it
        self.peak_phase = ""  # where no allocation made it
        self.host_alive: dict[int, int] = {}
        self.host_in_use = self.host_peak = 0
        self.phase_peaks: dict[str, int] = {}
        self.phase_peaks_at: dict[str, int] = {}  # length of `order` at each
        self._phase, self._phase_high, self._phase_high_at = "", 0, 0
        # Modules by the sequence number of the graph nodes made inside of them: number where a module began or ended.
        self.node_starts: list[int] = []
        self.node_modules: list[str] = []

    # -- recording ---------------------------------------------------------------------------------------------------

    def add(
        self,
        nbytes: int,
        category: Category,
        phase: str,
        operator: str,
        module: str,
        node: int = NO_NODE,
        micro_step: int = -1,
        forward: bool = False,
    ) -> int:
        """Record an allocation of `nbytes` (already rounded). Returns its id."""
        id = len(self.bytes)
        self.bytes.append(nbytes)
        self.category.append(category)
        self.phase.append(phase)
        self.operator.append(operator)
        self.module.append(module)
        self.node.append(node)
        self.micro_step.append(micro_step)
        self.forward.append(forward)
        if category is Category.host:
            self.host_alive[id] = nbytes
            self.host_in_use += nbytes
            self.host_peak = max(self.host_peak, self.host_in_use)
            return id
        self.alive[id] = nbytes
        self.order.append(id)
        self.in_use += nbytes
        used = self.in_use
        if used > self._phase_high:
            self._phase_high, self._phase_high_at = used, len(self.order)
        if used > self.peak:
            self.peak, self.peak_at, self.peak_id = used, len(self.order), id
        return id

    def end(self, id: int) -> None:
        """Record that an allocation is gone. May be called by the garbage collector in the middle of anything."""
        nbytes = self.alive.pop(id, 0)
        if nbytes:
            self.order.append(~id)
            self.in_use -= nbytes
        else:
            self.host_in_use -= self.host_alive.pop(id, 0)

    def switch_phase(self, phase: str) -> None:
        """From now on `phase` runs. What is in use at the border belongs to both."""
        self._flush()
        self._phase = phase
        self._phase_high, self._phase_high_at = self.in_use, len(self.order)

    def reset_peak(self) -> None:
        """Peaks start again from what is in use now."""
        self.peak, self.peak_at, self.peak_id = self.in_use, len(self.order), None
        self.peak_phase = self._phase
        self.host_peak = self.host_in_use
        self.phase_peaks.clear()
        self.phase_peaks_at.clear()
        self._phase_high, self._phase_high_at = self.in_use, len(self.order)

    def _flush(self) -> None:
        if self._phase and self._phase_high > self.phase_peaks.get(self._phase, -1):
            self.phase_peaks[self._phase] = self._phase_high
            self.phase_peaks_at[self._phase] = self._phase_high_at

    def mark_node(self, sequence_number: int, module: str) -> None:
        """Graph nodes from `sequence_number` on are made by `module`, until the next mark."""
        starts = self.node_starts
        if starts and starts[-1] == sequence_number:
            self.node_modules[-1] = module
        else:
            starts.append(sequence_number)
            self.node_modules.append(module)

    # -- reporting ---------------------------------------------------------------------------------------------------

    def module_of(self, id: int) -> str:
        """The module that ran, or, in a backward pass, the one whose forward made the node that ran."""
        module = self.module[id]
        if not module and self.node[id] != NO_NODE:
            at = bisect_right(self.node_starts, self.node[id]) - 1
            module = self.node_modules[at] if at >= 0 else ""
        return module

    def events(self) -> Iterator[Event]:
        for entry in self.order:
            id = entry if entry >= 0 else ~entry
            yield Event(
                "malloc" if entry >= 0 else "free",
                id,
                self.bytes[id],
                self.phase[id],
                self.operator[id],
                self.module_of(id),
                self.category[id].value,
                self.micro_step[id],
            )

    def alive_at(self, position: int) -> list[int]:
        """Ids alive after the first `position` entries of `order`, oldest first."""
        alive: dict[int, None] = {}
        for entry in self.order[:position]:
            if entry >= 0:
                alive[entry] = None
            else:
                del alive[~entry]
        return list(alive)

    def categories_at(self, positions: dict[str, int]) -> dict[str, dict[str, float]]:
        """MiB alive by category after the first so many entries of `order`, for several such positions by name."""
        found: dict[str, dict[str, float]] = {}
        alive: dict[Category, int] = defaultdict(int)
        done = 0
        for name, position in sorted(positions.items(), key=lambda item: item[1]):
            for entry in self.order[done:position]:
                id = entry if entry >= 0 else ~entry
                alive[self.category[id]] += self.bytes[id] if entry >= 0 else -self.bytes[id]
            done = position
            found[name] = {c.value: alive[c] / MIB for c in Category if alive[c]}
        return found

    def report(self) -> Peak:
        self._flush()
        by_category: dict[str, int] = defaultdict(int)
        holders: dict[tuple[str, str], list[int]] = defaultdict(list)
        temporary: dict[str, int] = defaultdict(int)
        for id in self.alive_at(self.peak_at):
            category = self.category[id].value
            by_category[category] += self.bytes[id]
            if self.category[id] is Category.temporary:
                temporary[self.phase[id]] += self.bytes[id]
            name = self.owner.get(id) or self.module_of(id) or self.operator[id]
            holders[name, category].append(self.bytes[id])
        ranked = sorted(holders.items(), key=lambda item: -sum(item[1]))[:LARGEST]
        at = self.peak_id
        return Peak(
            mib=self.peak / MIB,
            phase=self.peak_phase if at is None else self.phase[at],
            operator="" if at is None else self.operator[at],
            module="" if at is None else self.module_of(at),
            at_peak_mib={c.value: by_category[c.value] / MIB for c in Category if c.value in by_category},
            largest=[Holder(name, category, sum(sizes) / MIB, len(sizes)) for (name, category), sizes in ranked],
            phase_peaks_mib={phase: high / MIB for phase, high in self.phase_peaks.items()},
            at_phase_peak_mib=self.categories_at(self.phase_peaks_at),
            host_peak_mib=self.host_peak / MIB,
            temporary_mib={phase: size / MIB for phase, size in temporary.items()},
        )
