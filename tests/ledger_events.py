"""A ledger's log as a list of events, which tests compare."""

from __future__ import annotations

from typing import NamedTuple

from sweep.memory.ledger import Ledger


class Event(NamedTuple):
    kind: str  # "malloc" | "free"
    id: int
    bytes: int
    phase: str  # of the allocation
    operator: str
    module: str
    category: str
    micro_step: int


def events(ledger: Ledger) -> list[Event]:
    log = ledger.log
    return [
        Event(
            "malloc" if entry >= 0 else "free", id, log.bytes[id], log.phase[id], log.operator[id], log.module_of(id),
            log.category[id].value, log.micro_step[id],
        )
        for entry in log.order
        for id in [entry if entry >= 0 else ~entry]
    ]  # fmt: skip


def what_happened(ledger: Ledger, phase: str = "") -> list[tuple[str, int, str]]:
    """Kind, bytes and operator, in order; of one phase, or of all."""
    return [(e.kind, e.bytes, e.operator) for e in events(ledger) if phase in ("", e.phase)]
