"""The data sources: deterministic, split without overlap, versioned by content, and clear about what cannot be used."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sweep.errors import BadInput
from sweep.workload.data import (
    Digits,
    RandomImages,
    RandomTokens,
    TextBytes,
    TextFile,
    is_text,
    read_stdlib,
    read_text,
    split_by_file,
)

MakeSource = Callable[[int], Any]
SOURCES: dict[str, MakeSource] = {
    "text": lambda seed: TextBytes(seq_len=32, seed=seed, max_mib=0.5),
    "digits": lambda seed: Digits(seed),
    "tokens": lambda seed: RandomTokens(100, 16, seed),
    "images": lambda seed: RandomImages([3, 4, 5], 7, seed),
}
EVERY_SOURCE = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Every source


@EVERY_SOURCE
def test_batches_follow_from_seed_and_step(make: MakeSource) -> None:
    source, again, other = make(0), make(0), make(1)
    batch = source.train_batch(3, 8)
    source.train_batch(9, 4)
    assert equal(batch, source.train_batch(3, 8)), "what was asked before does not matter"
    assert equal(batch, again.train_batch(3, 8))
    assert not torch.equal(batch["inputs"], source.train_batch(4, 8)["inputs"])
    assert not torch.equal(batch["inputs"], other.train_batch(3, 8)["inputs"])
    assert equal(source.eval_batch(1, 8), again.eval_batch(1, 8))
    assert not torch.equal(source.eval_batch(0, 8)["inputs"], source.eval_batch(1, 8)["inputs"])
    assert isinstance(source.version, str)
    assert len(source.version) == 64
    assert source.version == again.version


@EVERY_SOURCE
def test_held_out_samples_do_not_depend_on_the_batch_size_and_begin_again(make: MakeSource) -> None:
    source = make(0)
    whole = source.eval_batch(0, 8)
    parts = [source.eval_batch(i, 4) for i in range(2)]
    assert equal(whole, {name: torch.cat([part[name] for part in parts]) for name in whole})
    last = source.eval_batch(0, source.eval_samples + 3)
    assert all(torch.equal(last[name][-3:], whole[name][:3]) for name in whole)


@EVERY_SOURCE
def test_a_negative_seed_is_a_seed(make: MakeSource) -> None:
    assert not torch.equal(make(-1).train_batch(0, 4)["inputs"], make(0).train_batch(0, 4)["inputs"])


@EVERY_SOURCE
def test_batches_are_host_tensors_and_leave_torchs_random_state_alone(make: MakeSource) -> None:
    source = make(0)
    state = torch.get_rng_state()
    with torch.device("meta"):
        batches = [source.train_batch(0, 4), source.eval_batch(0, 4)]
    for batch in batches:
        assert batch.keys() == {"inputs", "targets"}
        assert all(t.device.type == "cpu" and t.is_contiguous() and len(t) == 4 for t in batch.values())
        assert batch["targets"].dtype is torch.int64
        storages = {t.untyped_storage().data_ptr() for t in batch.values()}
        assert len(storages) == 2, "inputs and targets can be copied and freed one by one"
    assert torch.equal(state, torch.get_rng_state())


@EVERY_SOURCE
def test_the_description_is_plain_and_names_no_machine_path(make: MakeSource) -> None:
    described = make(0).describe()
    assert described["source"]
    assert all(isinstance(k, str) and isinstance(v, (str, int)) for k, v in described.items())
    assert not [v for v in described.values() if str(v).startswith(os.sep)]


# Text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty-five text files of 400 to 424 bytes, each of one letter, and what must be left out."""
    root = tmp_path / "books"
    for i in range(25):
        file = root / f"part{i % 3}" / f"{i:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([ord("A") + i]) * (400 + i))
    (root / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0" * 50)
    (root / "latin.txt").write_bytes("é".encode("latin-1") * 500)
    (root / "empty.txt").write_bytes(b"")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden" * 100)
    (root / ".hidden.txt").write_text("hidden" * 100)
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "x.txt").write_text("cache" * 100)
    (root / "loop").symlink_to(root)
    return root


def test_default_text_is_the_standard_library_without_tests() -> None:
    text = read_stdlib(16)
    names = [file.name for file in text.files]
    assert names == sorted(names)
    assert {"argparse.py", "asyncio/events.py", "json/decoder.py"} < set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not [name for name in names if name.startswith("_sysconfigdata")]
    library = Path(sysconfig.get_path("stdlib"))
    assert next(f for f in text.files if f.name == "argparse.py").content == (library / "argparse.py").read_bytes()
    source = TextBytes(seq_len=128)
    assert source.bytes.dtype is torch.uint8
    assert len(source.bytes) == sum(len(f.content) for f in text.files)
    assert len(source.bytes) > 4 * 2**20
    assert 0.02 < len(source.held_out) / len(source.bytes) < 0.3
    assert source.describe()["files"] == len(names)


def test_windows_come_from_their_own_part_and_targets_are_the_next_bytes(folder: Path) -> None:
    source = TextBytes(seq_len=20, path=str(folder))
    for part, batch in ((source.train, source.train_batch(0, 64)), (source.held_out, source.eval_batch(0, 8))):
        assert batch["inputs"].shape == batch["targets"].shape == (len(batch["inputs"]), 20)
        assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        content = bytes(part.tolist())
        for inputs, targets in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
            assert bytes([*inputs, targets[-1]]) in content


def test_held_out_windows_cover_the_part_once_without_overlap(folder: Path) -> None:
    source = TextBytes(seq_len=20, path=str(folder))
    seen = source.eval_batch(0, source.eval_samples)["inputs"]
    expected = source.held_out[: source.eval_samples * 20].view(-1, 20).long()
    assert not torch.equal(seen, expected), "shuffled, so that a few batches stand for all files"
    assert sorted(seen.tolist()) == sorted(expected.tolist())
    assert 0 < len(source.held_out) - source.eval_samples * 20 <= 20


def test_training_windows_reach_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(32, 62)))  # 27 bytes to train on, 3 held out
    inputs = TextBytes(seq_len=2, path=str(path)).train_batch(0, 2000)["inputs"]
    assert inputs[:, 0].unique().tolist() == list(range(32, 32 + 25))


def test_a_folder_is_split_by_file_without_overlap(folder: Path) -> None:
    source = TextBytes(seq_len=20, path=str(folder))
    letters = (set(source.train.tolist()), set(source.held_out.tolist()))
    assert not letters[0] & letters[1]
    assert letters[0] | letters[1] == set(range(ord("A"), ord("A") + 25)), "all text, and nothing hidden or binary"
    assert len(letters[1]) == 3, "every tenth of 25, the first included"
    described = source.describe()
    assert described["files"] == 25
    assert described["skipped_files"] == 2
    assert str(described["split"]).startswith("by file")


def test_the_split_depends_on_names_alone() -> None:
    files = [TextFile(f"{i}.py", b"x") for i in range(40)]
    names = [sorted(f.name for f in part) for part in split_by_file(files)]
    assert names == [sorted(f.name for f in part) for part in split_by_file(files[::-1])]
    assert len(names[1]) == 4
    assert [len(part) for part in split_by_file(files[:2])] == [1, 1], "two files are enough"


def test_a_single_file_is_split_by_position(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    source = TextBytes(seq_len=20, path=str(path))
    assert bytes(source.train.tolist()) == b"a" * 900
    assert bytes(source.held_out.tolist()) == b"b" * 100
    assert source.describe()["split"] == "by position, last tenth held out"


def test_the_version_is_a_digest_of_names_and_bytes(folder: Path) -> None:
    def version() -> str:
        return TextBytes(seq_len=20, path=str(folder)).version

    first = version()
    (folder / "picture.png").unlink()
    assert version() == first, "what is not read does not count"
    file = folder / "part0" / "00.txt"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    changed = version()
    assert changed != first
    file.rename(file.with_name("renamed.txt"))
    assert len({first, changed, version()}) == 3
    assert TextBytes(seq_len=20, seed=9, path=str(folder)).version == version(), "the seed is not the data's"


def test_the_cap_keeps_the_first_bytes_and_is_told(folder: Path) -> None:
    cap = 3000 / 2**20
    capped = TextBytes(seq_len=20, path=str(folder), max_mib=cap)
    assert len(capped.bytes) == 3000
    assert capped.describe()["capped"] != "no"
    in_order = b"".join(p.read_bytes() for p in sorted(folder.glob("part*/*.txt")))
    assert b"".join(f.content for f in read_text(folder, cap).files) == in_order[:3000]
    assert TextBytes(seq_len=20, path=str(folder)).describe()["capped"] == "no"
    single = read_text(folder / "part0" / "00.txt", 100 / 2**20)
    assert single.truncated
    assert len(single.files[0].content) == 100
    exact = read_text(folder / "part0" / "00.txt", 400 / 2**20)
    assert not exact.truncated
    assert len(exact.files[0].content) == 400


def test_a_character_that_the_cap_cuts_is_still_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("aé" * 100, encoding="utf-8")
    assert read_text(path, 5 / 2**20).files[0].content == "aéa".encode() + "é".encode()[:1]
    assert is_text("é".encode())
    assert not is_text("é".encode()[:1])
    assert is_text("é".encode()[:1], cut=True)
    assert not is_text(b"a\0b")


def test_a_home_relative_path_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    assert TextBytes(seq_len=20, path="~/books").version == TextBytes(seq_len=20, path=str(folder)).version


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _file(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)


def _small_files(path: Path, count: int) -> None:
    path.mkdir()
    for i in range(count):
        (path / f"{i}.txt").write_text("a" * 20)


BAD_PATHS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda p: None, "does not exist"),
    "empty file": (lambda p: p.write_bytes(b""), "is empty"),
    "empty folder": (lambda p: p.mkdir(), "is an empty folder"),
    "binary file": (lambda p: p.write_bytes(b"ab\0" * 500), "is not utf-8 text"),
    "other encoding": (lambda p: p.write_bytes(b"\xe9" * 500), "is not utf-8 text"),
    "binary folder": (lambda p: _file(p / "x", b"\0" * 500), r"holds no utf-8 text \(1 other file"),
    "hidden only": (lambda p: _file(p / ".x", b"a" * 500), "is an empty folder"),
    "short file": (lambda p: p.write_text("a" * 100), "its held-out part has 10 bytes, a window needs 33"),
    "tiny file": (lambda p: p.write_text("a" * 8), "its training part has 8 bytes, a window needs 33"),
    "short folder": (lambda p: _small_files(p, 9), "its held-out part has 20 bytes, a window needs 33"),
    "pipe": (_pipe, "is neither a file nor a folder"),
}


@pytest.mark.parametrize(("make", "wrong"), BAD_PATHS.values(), ids=BAD_PATHS.keys())
def test_a_path_that_cannot_be_used_is_one_clear_line(
    tmp_path: Path, make: Callable[[Path], object], wrong: str
) -> None:
    path = tmp_path / "given"
    make(path)
    with pytest.raises(BadInput, match=wrong) as error:
        TextBytes(seq_len=32, path=str(path))
    assert error.value.key == "workload.data.path"
    assert str(error.value).startswith(f"workload.data.path={path}: ")
    assert "\n" not in str(error.value)


def test_small_files_add_up_to_a_window(tmp_path: Path) -> None:
    _small_files(tmp_path / "given", 30)  # three are held out
    assert TextBytes(seq_len=32, path=str(tmp_path / "given")).eval_samples == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 1000)
    path.chmod(0)
    with pytest.raises(BadInput, match="cannot be read"):
        TextBytes(seq_len=32, path=str(path))


def test_a_path_that_was_not_given_and_a_cap_of_nothing_are_named() -> None:
    with pytest.raises(BadInput, match=r'workload\.data\.path="": names no file or folder'):
        TextBytes(seq_len=32, path="")
    with pytest.raises(BadInput, match=r"workload.data.max_mib=0: is not above zero"):
        TextBytes(seq_len=32, max_mib=0)


def test_a_python_without_library_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BadInput, match=r"workload\.data\.path=null: this Python has no standard library sources"):
        TextBytes(seq_len=32)


# Digits and random data


def test_digits_are_split_and_normalised() -> None:
    source = Digits()
    train, held_out = source.train_batch(0, source.train_samples), source.eval_batch(0, source.eval_samples)
    assert train["inputs"].shape == (1438, 1, 8, 8)
    assert held_out["inputs"].shape == (359, 1, 8, 8)
    assert train["inputs"].dtype is torch.float32
    assert abs(train["inputs"].mean()) < 1e-4
    assert abs(train["inputs"].std() - 1) < 1e-3
    for batch in (train, held_out):
        assert batch["targets"].unique().tolist() == list(range(10))
    images = {tuple(image.flatten().tolist()) for image in train["inputs"]}
    assert not [1 for image in held_out["inputs"] if tuple(image.flatten().tolist()) in images]
    assert equal(Digits(1).eval_batch(0, 359), held_out), "the split does not depend on the seed"


def test_an_epoch_of_digits_shows_each_image_once() -> None:
    source = Digits()

    def key(batch: dict[str, torch.Tensor]) -> list[list[float]]:
        return batch["inputs"].flatten(1).tolist()

    shown = [row for step in range(12) for row in key(source.train_batch(step, 128))]  # 1536 over 1438
    first_epoch = shown[:1438]
    assert sorted(first_epoch) == sorted(key(source.train_batch(0, 1438)))
    assert len({tuple(row) for row in first_epoch}) == 1438
    assert shown[1438:] == key(source.train_batch(1, 1438))[: 1536 - 1438], "the next epoch goes on within the batch"
    assert shown[1438:] != first_epoch[:98], "in another order"


def test_random_tokens_and_images_have_their_shapes_and_ranges() -> None:
    tokens = RandomTokens(vocab_size=5, seq_len=64).train_batch(0, 8)
    assert tokens["inputs"].shape == tokens["targets"].shape == (8, 64)
    assert tokens["inputs"].unique().tolist() == list(range(5))
    assert torch.equal(tokens["inputs"][:, 1:], tokens["targets"][:, :-1])
    images = RandomImages([3, 8, 8], classes=4).train_batch(0, 64)
    assert images["inputs"].shape == (64, 3, 8, 8)
    assert images["inputs"].dtype is torch.float32
    assert images["targets"].unique().tolist() == list(range(4))
    assert RandomTokens(5, 64).version != RandomTokens(6, 64).version
