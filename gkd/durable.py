"""Files that outlive a crash: whole or not at all, flushed to the disk, with checksums; and who may write them."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLAIM = "GKD_CLAIM"
"""Variable of a program that goes on in place of another: the descriptor by which that holds a directory."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Checksum of a file's content: its length in bytes and its SHA-256 (hex)."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DirectoryIdentity:
    """A directory as it was when a program began to write into it. What is open there goes along where it is moved."""

    path: Path
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> DirectoryIdentity:
        """Return the directory that is at ``path`` now."""
        status = path.stat()
        return cls(path, status.st_dev, status.st_ino)

    @property
    def is_there(self) -> bool:
        """Whether it is, as far as can be seen."""
        try:
            return self.describe_change() is None
        except OSError:
            return False

    def describe_change(self) -> str | None:
        """Return that it is not there any more; None where it is. Raises OSError where that cannot be seen."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return f"{self.path} was moved or deleted while the run went on"
        same = (status.st_dev, status.st_ino) == (self.device, self.inode)
        return None if same else f"{self.path} was moved while the run went on, and another directory is there now"


def make_beside(path: Path) -> Path:
    """Make ``path_2``, or the first after it that is not there, and return it. Raises OSError."""
    for number in itertools.count(2):
        beside = path.with_name(f"{path.name}_{number}")
        with suppress(FileExistsError):
            beside.mkdir(parents=True)
            return beside
    raise AssertionError("itertools.count ends")


def compute_checksum(path: Path) -> Checksum:
    """Read a file whole for its checksum. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Checksum(file.tell(), digest)


def replace(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file whole or not at all; it is on the disk when this returns. Raises OSError, which names the file.

    ``content`` may come in parts, and be read from the file that it replaces.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        flush(temporary)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def remove_drafts(path: Path) -> None:
    """Delete what processes that were killed had written of a file with :func:`replace`.

    What another process of this machine is writing stays, and so does what cannot be deleted.
    """
    for draft in path.parent.glob(f".{path.name}.[0-9]*"):
        pid = draft.suffix.removeprefix(".")
        if pid.isdecimal() and (pid == str(os.getpid()) or not Path("/proc", pid).exists()):
            with suppress(OSError):
                draft.unlink()


def flush(path: Path) -> None:
    """Return once a file, or a directory's list of names, is on the disk. Raises OSError, which names it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def hold(descriptor: int, shared: bool = False) -> bool:
    """Lock an open file or directory until the descriptor is closed; returns whether nobody else holds it.

    ``shared``: others may then lock it so, too. Where a file system has no locks, as some network ones, nobody holds
    anything: two programs at once are up to the user there.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def hand_on(descriptor: int) -> None:
    """Have a program that replaces this one (``exec``) hold what this ``descriptor`` holds."""
    os.set_inheritable(descriptor, True)
    os.environ[CLAIM] = str(descriptor)


def take_over(path: Path) -> int | None:
    """Return the descriptor by which the program that this one replaced holds ``path``; None where there is none."""
    handed_on = os.environ.pop(CLAIM, "")
    if not handed_on.isdecimal():
        return None
    descriptor = int(handed_on)
    try:
        os.set_inheritable(descriptor, False)
        return descriptor if os.path.samestat(os.fstat(descriptor), path.stat()) else None
    except OSError:
        return None


def is_held(path: Path) -> bool:
    """Return whether somebody holds a file or a directory, as far as the file system has locks. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not hold(descriptor, shared=True)
    finally:
        os.close(descriptor)


def create_secret(path: Path, text: str) -> bool:
    """Write a file that only its owner may read, all of it at once, and only where there is none; return whether.

    Its directory is made where it is not there. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # for its owner alone
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.link(draft, path)
    except FileExistsError:  # somebody was faster
        return False
    finally:
        Path(draft).unlink()
    return True


def replace_directory(new: Path, path: Path) -> None:
    """Put the directory ``new`` in the place of ``path``, flushed, with the permissions that new files have.

    Both are on one file system, and ``path`` is no link. Raises OSError.
    """
    apply_umask([file for file in new.rglob("*") if file.is_file()])
    for file in (*new.rglob("*"), new):
        flush(file)
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():  # what it holds takes long to delete, so its name goes first
        path.replace(old)
    new.replace(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)  # what stays is in nobody's way, and goes the next time


def move_files(new: Path, directory: Path, last: str) -> None:
    """Move all that ``new`` holds into ``directory``, on the same file system: ``last`` once the others are there.

    Raises OSError.
    """
    for path in sorted(new.iterdir(), key=lambda path: path.name == last):
        if path.name == last:
            flush(directory)
        path.replace(directory / path.name)
    flush(directory)


def apply_umask(files: Sequence[Path]) -> None:
    """Give files the permissions that the umask leaves, where a library made them for their owner alone."""
    if not files:
        return
    probe = files[0].with_name(f".{files[0].name}.permissions")
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in files:
        file.chmod(mode)


def reason(error: Exception, path: Path | None = None) -> str:
    """Return what went wrong with which file, in one line: ``no space left on device: /path``.

    ``path`` is named where the error names none. Libraries may have the system's error in their own one's text alone.
    """
    name = getattr(error, "filename", None) or path
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    if code := re.search(r"\(os error (\d+)\)", text):
        text = os.strerror(int(code[1]))
    return f"{text[:1].lower()}{text[1:]}" + (f": {name}" if name else "")
