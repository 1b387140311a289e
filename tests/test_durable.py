"""Files that outlive a crash: what is there when a write is cut short, what is flushed and in which order."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gkd import durable
from gkd.durable import Checksum, compute_checksum, hold, is_held, reason, remove_drafts, replace, replace_directory


class Crash(BaseException):
    """The process ends here: nothing that comes after it is done."""


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """What is flushed and renamed, with names, in order."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        calls.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        calls.append(("rename", str(target)))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    yield calls


def test_content_is_on_the_disk_before_its_name_and_its_name_before_the_return(
    order: list[tuple[str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "state.json"
    replace(file, b"new")
    assert file.read_bytes() == b"new"
    (first, temporary), *rest = order
    assert first == "fsync" and temporary.startswith(f"{tmp_path}/.state.json")
    assert rest == [("rename", str(file)), ("fsync", str(tmp_path))]


def test_a_write_that_a_signal_ends_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(tmp_path / "page", write_half())
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_of_a_file_is_deleted(tmp_path: Path) -> None:
    """And nothing else: what others are writing, and files of other names."""
    ended = 1 << 22  # which is no process's number: Linux begins again before it
    kept = ["page", ".page", f".page.{os.getppid()}", f".page.old.{ended}", f".other.{ended}", ".page.1a"]
    for name in [*kept, f".page.{ended}", f".page.{os.getpid()}"]:  # of this process before it replaced itself
        (tmp_path / name).touch()
    remove_drafts(tmp_path / "page")
    remove_drafts(tmp_path / "missing" / "page")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_directory_is_flushed_file_by_file_before_its_name(order: list[tuple[str, str]], tmp_path: Path) -> None:
    new, path = tmp_path / "new", tmp_path / "model"
    (new / "inner").mkdir(parents=True)
    (new / "inner" / "weights").write_bytes(b"w")
    (new / "inner" / "weights").chmod(0o600)  # as safetensors makes them
    path.mkdir()
    (path / "old").write_text("")
    umask = os.umask(0o027)
    try:
        replace_directory(new, path)
    finally:
        os.umask(umask)
    assert [file.name for file in path.rglob("*")] == ["inner", "weights"]
    assert stat.S_IMODE((path / "inner" / "weights").stat().st_mode) == 0o640
    renamed = order.index(("rename", str(path)))
    flushed = {name for kind, name in order[:renamed] if kind == "fsync"}
    assert flushed == {str(new), f"{new}/inner", f"{new}/inner/weights"}
    assert order[renamed + 1 :] == [("fsync", str(tmp_path))]


def test_a_crash_while_an_old_directory_is_deleted_leaves_the_new_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights take seconds to delete."""
    path, unlink = tmp_path / "best", os.unlink
    for content in ("old", "new"):
        (tmp_path / content).mkdir()
        for file in ("config", "weights"):
            (tmp_path / content / file).write_text(content)
    replace_directory(tmp_path / "old", path)

    def crash(name: str, *, dir_fd: int | None = None) -> None:
        if Path(name).name == "weights":
            raise Crash
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", crash)
    with pytest.raises(Crash):
        replace_directory(tmp_path / "new", path)
    monkeypatch.undo()
    assert {file.name: file.read_text() for file in path.iterdir()} == {"config": "new", "weights": "new"}
    (tmp_path / "new").mkdir()
    replace_directory(tmp_path / "new", path)
    assert [file.name for file in tmp_path.iterdir()] == ["best"] and not list(path.iterdir())


def test_a_crash_before_the_rename_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "latest"
    replace(file, b"old")

    def crash(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(Crash):
        replace(file, b"new")
    assert file.read_bytes() == b"old"
    monkeypatch.undo()
    replace(file, b"newer")  # what the crash left beside it is in nobody's way
    assert file.read_bytes() == b"newer"


@pytest.mark.parametrize("content", [b"x" * 100_000, [b"new", b"x" * 100_000]])
def test_what_does_not_fit_is_named_with_the_file_and_leaves_nothing_beside(
    content: bytes | list[bytes], tmp_path: Path
) -> None:
    """As on a full disk, a part of it is written."""
    file, limits = tmp_path / "state.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    replace(file, b"old")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(OSError) as caught:
            replace(file, content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert reason(caught.value) == f"{os.strerror(errno.EFBIG).lower()}: {file}"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert file.read_bytes() == b"old"


def test_what_cannot_be_flushed_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = tmp_path / "state.json"
    monkeypatch.setattr(durable.os, "fsync", fail)
    with pytest.raises(OSError) as caught:
        replace(file, b"new")
    assert reason(caught.value) == f"input/output error: {file}"
    assert not file.exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on device: /there"),
        (OSError(errno.ENOSPC, "No space left on device", "/named"), "no space left on device: /named"),
        (RuntimeError("I/O error: oh\n (os error 28)"), "no space left on device: /there"),  # as safetensors says it
        (ValueError("Strange\n thing"), "strange thing: /there"),
    ],
)
def test_a_reason_is_one_line_with_the_file(error: Exception, expected: str) -> None:
    assert reason(error, Path("/there")) == expected


def test_a_sum_is_of_all_bytes(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    assert compute_checksum(file) == Checksum(3, sha256)
    file.write_bytes(b"abd")
    assert compute_checksum(file).sha256 != sha256


def test_a_directory_is_held_by_one_or_shared_by_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (os.open(tmp_path, os.O_RDONLY) for _ in range(3))
    try:
        assert hold(first) and not hold(second) and not hold(second, shared=True) and is_held(tmp_path)
        os.close(first)
        assert hold(second, shared=True) and hold(third, shared=True) and not hold(third)
        assert not is_held(tmp_path)  # by somebody who keeps others from it: who looks at it so does not

        def without_locks(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr("fcntl.flock", without_locks)
        assert hold(third)
    finally:
        for descriptor in (second, third):
            os.close(descriptor)
