"""What the documentation holds: pages, links, code, and the commands among it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gkd

ROOT = Path(gkd.__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "recipes/*/README.md")
    for path in ROOT.glob(pattern)
)
MODULES = {
    "python -m gkd.main": "train",
    "python -m gkd.plan": "plan",
    "python -m gkd.evaluate": "evaluate",
    "python -m gkd.report": "report",
    "python -m gkd.doctor": "doctor",
    "python -m gkd.monitor": "monitor",
    "python -m gkd.export": "export",
    "python -m gkd.teacher.serve": "serve-teacher",
    "python launch/verify_gpus.py": "verify-gpus",
    "python launch/submit.py": "submit",
}
OF_OTHERS = {
    "pip install": {"-e", "nixl", "flash-linear-attention", "causal-conv1d", "pre-commit"},
    "apt-get install": {"chromium", "gcc", "python3-dev"},
    "pre-commit install": set(),
    "mkdocs build": {"--strict"},
    "kubectl apply": {"-f"},
    "nvidia-cuda-mps-control": {"-d"},
    "nvidia-smi": {"-L"},
    "source .venv/bin/activate": set(),
    "ray start": {"--num-gpus=7"},
    "scancel": {"--batch", "--signal=TERM"},
    "docker run": {"--cpus"},
    "docker pause": set(),
    "uv run": {"gkd", "train"},
}
"""Commands of other projects, and what pages give them beside files and extras of this one."""
OTHER_PROGRAMS = re.compile(
    r"(?:apt|apt-get|bash|conda|curl|docker|git|helm|kubectl|make|mkdocs|mlflow|nvidia-smi|pip|podman|pre-commit|pytest"
    r"|python3?|ray|sbatch|scancel|sh|srun|tensorboard|uv|wandb)(?= [\w./+-])"
)
MODULE = re.compile(r"python -m (tests(?:\.\w+)+)(?= |$)")
SCRIPT = re.compile(r"^(?:python |bash |sh |sbatch )?(?:\./)?((?:launch|recipes|tests)/[\w/.-]+\.(?:py|sh|sbatch))\b")
VARIABLE = re.compile(r'^ {4}([A-Z]+)="(.*)"$', re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A command of the documentation.

    ``program`` is a command of ``gkd``, the path of a script or of a module of the tests, or a key of OF_OTHERS.
    """

    page: Path
    text: str
    program: str
    arguments: tuple[str, ...]

    @property
    def options(self) -> list[str]:
        return [part.partition("=")[0] for part in self.arguments if part.startswith("--")]

    @property
    def overrides(self) -> list[str]:
        return [part for part in self.arguments if "=" in part and not part.startswith("-")]


def blocks(text: str) -> Iterator[str]:
    """Lines of fenced and indented code, continued ones joined."""
    code = re.sub(r"^```.*?$(.*?)^```$", lambda match: indent(match[1]), text, flags=re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\\n\s*", " ", code).splitlines()
    yield from (line[4:] for line in lines if line.startswith("    "))


def indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def spans(text: str) -> Iterator[str]:
    """Inline code, outside of blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = "\n".join("" if line.startswith("    ") else line for line in prose.splitlines())
    yield from (match[1].replace("\n", " ") for match in re.finditer(r"`([^`]+)`", prose))


def commands(page: Path) -> Iterator[Command]:
    """Commands in a page: in blocks, in their comments after a colon, and in the text."""
    text = page.read_text(encoding="utf-8")
    variables = dict(VARIABLE.findall(text))
    lines = [*blocks(text), *spans(text)]
    for code in (*lines, *(line.rpartition(": ")[2] for line in lines if re.search(r"#.*: ", line))):
        line = re.sub(r"\$([A-Z]+)", lambda match: variables.get(match[1], match[0]), code.removeprefix("$ ").strip())
        line = re.sub(r"^(?:[A-Z_]+=\S+ +)+", "", line)  # the environment
        line = re.sub(r"^python -m +gkd ", "gkd ", line)
        program = _program(line)
        if program is None:
            continue
        line = re.sub(r"(?<=\s)\[(--[^\]]*?)( \.\.\.)?\]", r"\1", line)  # [--option] is one that there is
        line = re.sub(r"(?<=\s)\[[^\]]*\]", "", line)  # [OVERRIDES] may be left out
        words = shlex.split(line, comments=True)
        ends = [i for i, word in enumerate(words) if word in ("|", "&&", ";", "...")]
        words = words[: min(ends, default=len(words))]
        skip = len(program.split()) if program in OF_OTHERS else 1 + line.startswith("python ")
        skip = 2 if line.startswith("gkd ") else 3 if line.startswith("python -m") else skip
        yield Command(page, line, program, tuple(word for word in words[skip:] if not re.fullmatch(r"[A-Z_]+", word)))


def unknown_commands(page: Path) -> Iterator[str]:
    """Lines and inline code that begin as commands do, of which :func:`commands` knows none."""
    text = page.read_text(encoding="utf-8")
    for code in (*blocks(text), *spans(text)):
        line = re.sub(r"^python -m +gkd(?= |$)", "gkd", code.removeprefix("$ ").strip())
        if OTHER_PROGRAMS.match(line) and _program(line) is None:
            yield line


def _program(line: str) -> str | None:
    for start, program in MODULES.items():
        if re.match(rf"{re.escape(start)}(?![\w./])", line):
            return program
    if match := re.match(r"gkd (-{0,2}[a-z][a-z-]*)(?= |$)", line):
        return match[1]
    if match := MODULE.match(line):
        return f"{match[1].replace('.', '/')}.py"
    if match := SCRIPT.match(line):
        return match[1]
    return next((other for other in OF_OTHERS if f"{line} ".startswith(f"{other} ")), None)


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Path and anchor of every relative link of a page."""
    text = re.sub(r"`[^`\n]+`", "", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:", "mailto:")):
            path, _, anchor = target.partition("#")
            yield path, anchor


def python_files(page: Path) -> list[tuple[str, str]]:
    """Name and content of the Python files that a page shows, which begin with a comment that names them."""
    return re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def anchors(page: Path) -> set[str]:
    """What headings of a page are linked as."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {re.sub(r"\s+", "-", heading.strip()) for heading in plain}


def tables(text: str) -> Iterator[list[str]]:
    """Cells of every row of every table, without heads."""
    for line in text.splitlines():
        if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@cache
def metric_names() -> list[str]:
    """The names of metrics that docs/metrics.md describes, with NAME, GROUP and such where runs have others."""
    rows = tables((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    return [name for row in rows for name in re.findall(r"(?:^|, )`([a-z_]+(?:/[\w@]+)*)`", row[0])]


def is_described(metric: str) -> bool:
    """Return whether a metric of a run has one of these names."""
    patterns = (re.sub("[A-Z]+", "[^/]+", name).replace("@k", r"@\d+") for name in metric_names())
    return any(re.fullmatch(pattern, metric) for pattern in patterns)
