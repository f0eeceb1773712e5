"""Reading text as bytes: the running Python's standard library, or a file or folder of the user's."""

from __future__ import annotations

import codecs
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
