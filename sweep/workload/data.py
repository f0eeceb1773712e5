"""Data that needs no download: text bytes, scikit-learn's digits, and random tokens and images.

Every source is deterministic: a training batch follows from (seed, step), a held-out batch from (seed, index). Held-out
batch i has the samples i * size to (i + 1) * size and begins again after `eval_samples`. Batches live on the host;
numpy draws the indices, so that torch's random state and default device do not matter.
"""

from __future__ import annotations

import codecs
import copy
import dataclasses
import hashlib
import os
import platform
import random
import sysconfig
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sweep.errors import BadInput
from sweep.results import MIB

KEY = "workload.data.path"
TODO = "give a text file or a folder of text files, or null for Python's standard library"

# Beside installed packages and tests: what differs between two builds of one Python version.
_STDLIB_SKIPS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_STDLIB_SKIP_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass
class TextFile:
    name: str  # relative to the folder, with "/" on every system
    content: bytes


@dataclass
class Text:
    """Files in the order of their names, and what was left out."""

    source: str  # in words
    files: list[TextFile] = field(default_factory=list)
    skipped_files: int = 0  # not utf-8 text, or unreadable
    truncated: bool = False  # the cap was reached


def read_stdlib(max_mib: float) -> Text:
    """The *.py files of the running Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    text = Text(f"standard library of Python {platform.python_version()}")
    paths = (
        path
        for path in _walk(root, _STDLIB_SKIPS)
        if path.suffix == ".py"
        and not any(part.startswith(_STDLIB_SKIP_PREFIXES) for part in path.relative_to(root).parts)
    )
    _read_files(text, root, paths, max_mib)
    if not text.files:
        raise BadInput(KEY, None, "this Python has no standard library sources as files", "give a text file or folder")
    return text


def read_text(path: Path, max_mib: float) -> Text:
    """One text file, or all text files below a folder; hidden ones and those that are not utf-8 text are left out.

    Raises:
        BadInput: missing, unreadable, empty, or no text in it.
    """
    text = Text(str(path))
    if path.is_dir():
        _read_files(text, path, _walk(path, {"__pycache__"}, hidden=False), max_mib)
        if not text.files:
            skipped = text.skipped_files
            wrong = f"holds no utf-8 text ({skipped} other files)" if skipped else "is an empty folder"
            raise BadInput(KEY, path, wrong, TODO)
        return text
    if not path.exists():
        raise BadInput(KEY, path, "does not exist", TODO)
    if not path.is_file():  # a pipe or a socket would block
        raise BadInput(KEY, path, "is neither a file nor a folder", TODO)
    try:
        content, text.truncated = _read(path, int(max_mib * MIB))
    except OSError as error:
        raise BadInput(KEY, path, f"cannot be read ({error.strerror})", TODO) from error
    if not content:
        raise BadInput(KEY, path, "is empty", TODO)
    if not is_text(content, cut=text.truncated):
        raise BadInput(KEY, path, "is not utf-8 text", TODO)
    text.files.append(TextFile(path.name, content))
    return text


def is_text(content: bytes, cut: bool = False) -> bool:
    """Whether the bytes are utf-8 without NUL; `cut`: the last character may be incomplete."""
    if b"\0" in content:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=not cut)
    except UnicodeDecodeError:
        return False
    return True


def _walk(root: Path, skips: set[str], hidden: bool = True) -> Iterator[Path]:
    """Files below `root`, sorted by relative name. Links to folders are not followed, so that a cycle cannot occur."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skips and (hidden or not name.startswith("."))]
        found += [Path(folder, name) for name in names if hidden or not name.startswith(".")]
    yield from sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read_files(text: Text, root: Path, paths: Iterator[Path], max_mib: float) -> None:
    """Append files until the cap; the last one may be cut."""
    left = int(max_mib * MIB)
    for path in paths:
        if left <= 0:
            text.truncated = True
            break
        try:
            if not path.is_file():  # a pipe or a socket would block
                continue
            content, cut = _read(path, left)
        except OSError:
            text.skipped_files += 1
            continue
        if not content:
            continue
        if not is_text(content, cut):
            text.skipped_files += 1
            continue
        left -= len(content)
        text.truncated = text.truncated or cut
        text.files.append(TextFile(path.relative_to(root).as_posix(), content))


def _read(path: Path, limit: int) -> tuple[bytes, bool]:
    """The first `limit` bytes, and whether there are more."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    return content[:limit], len(content) > limit


# The second word of a random stream's seed, so that two uses of one seed do not draw the same numbers.
_TRAIN, _HELD_OUT = 0, 1


class TextBytes:
    """Windows of text as bytes: inputs (B, S) int64 in 0..255, targets (B, S) the next byte of each.

    A folder is split by file: of the files in the order of their names' SHA-256, every tenth is held out. A single file
    is split by position: its last tenth is held out. Training windows begin anywhere; held-out windows do not overlap.

    Args:
        seq_len: S, bytes of a window.
        seed: of the windows drawn.
        path: a text file or a folder of text files; None: the running Python's standard library sources.
        max_mib: bytes read at most, in MiB: the beginning of the files in the order of their names.

    Raises:
        BadInput: the path is missing, unreadable, empty or no text, or one of the two parts is shorter than a window.
    """

    same_shapes = True

    def __init__(self, seq_len: int, seed: int = 0, path: str | None = None, max_mib: float = 16.0) -> None:
        if path == "":
            raise BadInput(KEY, '""', "names no file or folder", TODO)
        if not max_mib > 0:
            raise BadInput("workload.data.max_mib", max_mib, "is not above zero", "give a positive number of MiB")
        text = read_stdlib(max_mib) if path is None else read_text(Path(path).expanduser(), max_mib)
        self.seq_len, self.seed = seq_len, seed
        self.version = digest(text.files)
        if len(text.files) > 1:
            train_files, held_out_files = split_by_file(text.files)
            train = b"".join(file.content for file in train_files)
            held_out = b"".join(file.content for file in held_out_files)
        else:
            content = text.files[0].content
            cut = len(content) - len(content) // 10
            train, held_out = content[:cut], content[cut:]
        for part, content in (("training", train), ("held-out", held_out)):
            if len(content) < seq_len + 1:
                raise BadInput(
                    KEY, path, f"is too small: its {part} part has {len(content)} bytes, a window needs {seq_len + 1}",
                    "give more text, or a shorter workload.seq_len",
                )  # fmt: skip
        self.bytes = torch.frombuffer(bytearray(train + held_out), dtype=torch.uint8)
        self.train, self.held_out = self.bytes[: len(train)], self.bytes[len(train) :]
        self.eval_samples = (len(held_out) - 1) // seq_len
        self._description: dict[str, str | int] = {
            "source": text.source,
            "files": len(text.files),
            "skipped_files": text.skipped_files,
            "split": "by file, every tenth held out" if len(text.files) > 1 else "by position, last tenth held out",
            "train_bytes": len(train),
            "held_out_bytes": len(held_out),
            "capped": f"at {max_mib:g} MiB" if text.truncated else "no",
        }

    def describe(self) -> dict[str, str | int]:
        return dict(self._description)

    def train_batch(self, step: int, size: int) -> Batch:
        starts = _generator(self.seed, _TRAIN, step).integers(len(self.train) - self.seq_len, size=size)
        return self._windows(self.train, starts)

    def eval_batch(self, index: int, size: int) -> Batch:
        order = _generator(self.seed, _HELD_OUT).permutation(self.eval_samples)
        return self._windows(self.held_out, order[_positions(index, size) % self.eval_samples] * self.seq_len)

    def _windows(self, text: Tensor, starts: np.ndarray) -> Batch:
        index = torch.from_numpy(starts[:, None] + np.arange(self.seq_len + 1))
        windows = text[index].long()
        return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


class Digits:
    """scikit-learn's bundled 8x8 digits: inputs (B, 1, 8, 8) float32, targets (B,) int64 in 0..9.

    1797 images; a fixed fifth is held out, whatever the seed. Normalised by the training part's mean and deviation.
    Each epoch is a permutation by (seed, epoch); a batch may reach over the end of an epoch.
    """

    same_shapes = True

    def __init__(self, seed: int = 0) -> None:
        # Imported here: it takes a second, which text need not pay.
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        raw = load_digits()
        images, targets = raw.images.astype(np.float32), raw.target.astype(np.int64)
        self.version = hashlib.sha256(images.tobytes() + targets.tobytes()).hexdigest()
        order = np.random.default_rng(0).permutation(len(images))
        train, held_out = np.sort(order[len(images) // 5 :]), np.sort(order[: len(images) // 5])
        images = (images - images[train].mean()) / images[train].std()
        self.seed = seed
        self._train = _images(images[train], targets[train])
        self._held_out = _images(images[held_out], targets[held_out])
        self.train_samples, self.eval_samples = len(train), len(held_out)

    def describe(self) -> dict[str, str | int]:
        return {
            "source": "scikit-learn's digits",
            "split": "by sample, a fixed fifth held out",
            "train_samples": self.train_samples,
            "held_out_samples": self.eval_samples,
        }

    def train_batch(self, step: int, size: int) -> Batch:
        positions = _positions(step, size)
        chosen = np.empty(size, dtype=np.int64)
        for epoch in np.unique(positions // self.train_samples):
            order = _generator(self.seed, _TRAIN, int(epoch)).permutation(self.train_samples)
            inside = positions // self.train_samples == epoch
            chosen[inside] = order[positions[inside] % self.train_samples]
        return _take(self._train, chosen)

    def eval_batch(self, index: int, size: int) -> Batch:
        return _take(self._held_out, _positions(index, size) % self.eval_samples)


class _Random:
    """Samples drawn from the seed alone. A held-out sample has a stream of its own, so batch sizes do not change it."""

    same_shapes = True

    def __init__(self, what: str, seed: int, eval_samples: int) -> None:
        self.seed, self.eval_samples = seed, eval_samples
        self.version = hashlib.sha256(f"{what}, seed {seed}, {eval_samples} held out".encode()).hexdigest()

    def train_batch(self, step: int, size: int) -> Batch:
        return self._draw(_generator(self.seed, _TRAIN, step), size)

    def eval_batch(self, index: int, size: int) -> Batch:
        samples = [int(i) for i in _positions(index, size) % self.eval_samples]
        drawn = [self._draw(_generator(self.seed, _HELD_OUT, i), 1) for i in samples]
        return {name: torch.cat([sample[name] for sample in drawn]) for name in drawn[0]}

    def _draw(self, generator: np.random.Generator, size: int) -> Batch:
        raise NotImplementedError


class RandomTokens(_Random):
    """Uniform token ids, for a model of one's own or for memory alone: inputs and next-token targets (B, S) int64.

    Args:
        vocab_size: ids are 0 to vocab_size - 1.
        seq_len: S, tokens per sample.
        seed: of all draws.
        eval_samples: different held-out samples.
    """

    def __init__(self, vocab_size: int, seq_len: int, seed: int = 0, eval_samples: int = 1024) -> None:
        self.vocab_size, self.seq_len = vocab_size, seq_len
        super().__init__(f"tokens below {vocab_size}, {seq_len} a sample", seed, eval_samples)

    def describe(self) -> dict[str, str | int]:
        return {"source": "random tokens", "vocab_size": self.vocab_size, "seq_len": self.seq_len}

    def _draw(self, generator: np.random.Generator, size: int) -> Batch:
        tokens = torch.from_numpy(generator.integers(self.vocab_size, size=(size, self.seq_len + 1)))
        return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


class RandomImages(_Random):
    """Normal pixels and uniform classes: inputs (B, *shape) float32, targets (B,) int64.

    Args:
        shape: of one sample, such as [3, 224, 224].
        classes: targets are 0 to classes - 1.
        seed: of all draws.
        eval_samples: different held-out samples.
    """

    def __init__(self, shape: list[int], classes: int, seed: int = 0, eval_samples: int = 1024) -> None:
        self.shape, self.classes = tuple(shape), classes
        super().__init__(f"images {self.shape}, {classes} classes", seed, eval_samples)

    def describe(self) -> dict[str, str | int]:
        return {"source": "random images", "shape": "x".join(map(str, self.shape)), "classes": self.classes}

    def _draw(self, generator: np.random.Generator, size: int) -> Batch:
        inputs = torch.from_numpy(generator.standard_normal((size, *self.shape), dtype=np.float32))
        return {"inputs": inputs, "targets": torch.from_numpy(generator.integers(self.classes, size=size))}


def digest(files: list[TextFile]) -> str:
    """SHA-256 over every file's name, length and bytes."""
    total = hashlib.sha256()
    for file in files:
        total.update(_name_bytes(file) + b"\0%d\0" % len(file.content))
        total.update(file.content)
    return total.hexdigest()


def split_by_file(files: list[TextFile]) -> tuple[list[TextFile], list[TextFile]]:
    """(training, held-out) of two or more files: every tenth by the digests of their names, the first included."""
    order = sorted(files, key=lambda file: hashlib.sha256(_name_bytes(file)).digest())
    held_out = {file.name for file in order[::10]}
    return [f for f in files if f.name not in held_out], [f for f in files if f.name in held_out]


def _name_bytes(file: TextFile) -> bytes:
    return file.name.encode("utf-8", "surrogateescape")  # names need not be utf-8


def _generator(seed: int, *words: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**64, *words])


def _positions(index: int, size: int) -> np.ndarray:
    return np.arange(index * size, (index + 1) * size)


def _images(images: np.ndarray, targets: np.ndarray) -> Batch:
    return {"inputs": torch.from_numpy(images[:, None]), "targets": torch.from_numpy(targets)}


def _take(samples: Batch, chosen: np.ndarray) -> Batch:
    index = torch.from_numpy(chosen)
    return {name: tensor[index] for name, tensor in samples.items()}


# -- batches: any nesting of tensors with the sample as dimension 0, and which of many are the largest ---------------

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
    for each in dataclasses.fields(batch):
        object.__setattr__(changed, each.name, map_batch(change, getattr(batch, each.name), rest))
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
