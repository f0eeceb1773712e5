"""Batches: any nesting of tensors with the sample as dimension 0, and which of many are the largest."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sweep.errors import BadInput

#: numpy takes seeds below this.
_NUMPY_SEEDS = 2**32


def seed_everything(seed: int) -> None:
    """Seed torch's generators (of every device), Python's and numpy's global one."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)


def python_states() -> tuple[Any, Any]:
    """The states of Python's and of numpy's generator, for `restore`."""
    return random.getstate(), np.random.get_state()


def restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def random_states(device: torch.device) -> dict[str, bytes]:
    """The state of each generator that code on `device` may draw from, by its name, as bytes to compare."""
    python, numpy = python_states()
    found = {"torch": torch.get_rng_state().numpy().tobytes(), "python": repr(python).encode()}
    found["numpy"] = repr((numpy[1].tobytes(), *numpy[2:])).encode()
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return found


#: A tensor, or a nesting of tensors in dicts and other mappings, lists, tuples and dataclasses. Dimension 0 is the
#: sample; tensors without dimensions, numbers and strings belong to all samples. The losses of this project take
#: {"inputs": what goes into the model, "targets": what goes into the loss (-100: ignored)}.
Batch = Any
#: Name, shape and dtype of each tensor.
Shapes = tuple[tuple[str, tuple[int, ...], Any], ...]

#: Batches that stand for all, where none is the largest in every dimension.
MOST_LARGEST = 3


def map_batch(
    change: Callable[[Tensor], Tensor], batch: Batch, rest: Callable[[Any], Any] = lambda value: value
) -> Batch:
    """The batch with `change` of each tensor in its place, and `rest` of whatever holds no tensor."""
    if isinstance(batch, Tensor):
        return change(batch)
    if next(_tensors(batch), None) is None:
        return rest(batch)
    if isinstance(batch, Mapping):
        items = {key: map_batch(change, value, rest) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return items
        filled = copy.copy(batch)  # whatever else it knows, such as a tokenizer's encodings
        for key, value in items.items():
            filled[key] = value
        return filled
    if isinstance(batch, (list, tuple)):
        values = [map_batch(change, value, rest) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    changed = copy.copy(batch)
    for field in dataclasses.fields(batch):
        object.__setattr__(changed, field.name, map_batch(change, getattr(batch, field.name), rest))
    return changed


def leaves_of(batch: Batch, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of a nesting and whatever else is no nesting, with their names."""
    if isinstance(batch, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(batch.items())
    elif isinstance(batch, (list, tuple)):
        items = enumerate(batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))
    else:
        yield name, batch
        return
    for key, value in items:
        yield from leaves_of(value, f"{name}.{key}" if name else str(key))


def _tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    return ((name, leaf) for name, leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def tensors_of(batch: Batch) -> list[Tensor]:
    return [tensor for _, tensor in _tensors(batch)]


def samples_in(batch: Batch) -> int:
    """Samples of a batch. Raises ValueError where it has no tensor with a dimension."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return len(tensor)
    raise ValueError("a batch without a tensor that has a dimension: its samples cannot be counted")


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop`. Lists beside the tensors that are as long as the batch (such as texts) are cut too."""
    samples = samples_in(batch)

    def rest(value: Any) -> Any:
        return value[start:stop] if isinstance(value, (list, tuple)) and len(value) == samples else value

    return map_batch(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, batch, rest)


def checked(batch: Batch, size: int, source: Any, method: str) -> Batch:
    """The batch, where each of its tensors has `size` samples. Raises BadInput naming workload.data."""
    wrong = "holds no tensor with a dimension"
    for name, tensor in _tensors(batch):
        if not tensor.dim():
            continue
        wrong = ""
        if len(tensor) != size:
            wrong = f"has {len(tensor)} samples in {name or 'it'} (shape {tuple(tensor.shape)}), {size} were asked for"
            break
    if wrong:
        name = f"{type(source).__module__}.{type(source).__qualname__}"
        todo = "return as many samples as `size` says, the sample as dimension 0 of every tensor"
        raise BadInput("workload.data", name, f"a batch of its {method} {wrong}", todo)
    return batch


def shapes_of(batch: Batch) -> Shapes:
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in _tensors(batch))


def largest_of(shapes: list[Shapes]) -> list[int]:
    """Positions, in order, of the batches that no other one exceeds: the first of each kind, MOST_LARGEST at most."""
    kinds: dict[Shapes, int] = {}
    for position, kind in enumerate(shapes):
        kinds.setdefault(kind, position)
    top = [kind for kind in kinds if not any(other is not kind and at_least(other, kind) for other in kinds)]
    top.sort(key=_elements, reverse=True)
    return sorted(kinds[kind] for kind in top[:MOST_LARGEST])


def at_least(one: Shapes, other: Shapes) -> bool:
    """Whether each tensor of `one` is at least as large in every dimension as the one of `other` in its place."""
    return len(one) == len(other) and all(
        n == m and t is u and len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True))
        for (n, a, t), (m, b, u) in zip(one, other, strict=True)
    )


def _elements(shapes: Shapes) -> int:
    total = 0
    for _, shape, dtype in shapes:
        count = dtype.itemsize
        for length in shape:
            count *= length
        total += count
    return total
