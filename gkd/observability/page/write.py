"""Writing report.html: data, style and scripts in one file."""

from __future__ import annotations

import html
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gkd import durable
from gkd.config.output_files import METRICS, REPORT, SAMPLES
from gkd.errors import ConfigError, describe_error
from gkd.observability.page.run import MAX_EVENTS, MAX_ROWS, describe
from gkd.observability.page.samples import Texts, read_samples
from gkd.observability.run_files import RunFiles, tell_apart

log = logging.getLogger("gkd")

ASSETS = Path(__file__).parents[1] / "assets"
SCRIPTS = ("uPlot.iife.min.js", "charts.js", "panels.js", "lanes.js", "samples.js", "report.js")
STYLES = ("uPlot.min.css", "report.css")


def write_page(runs: Sequence[RunFiles], file: Path, refresh_s: float | None = None) -> None:
    """Write the page of one or several runs, whole or not at all; ``refresh_s``: it loads itself again so often.

    Raises ConfigError for a run's file that cannot be read, and where the page cannot be written.
    """
    try:
        durable.replace(file, page(runs, refresh_s).encode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{durable.reason(error, file)}: gkd report --output names another file") from None


def page(runs: Sequence[RunFiles], refresh_s: float | None = None) -> str:
    """Return the page's text. Raises ConfigError for a run's file that cannot be read."""
    texts, described = Texts(), []
    for files in runs:
        samples = read_samples(files.path / SAMPLES, texts, len(runs))
        described.append(describe(files) | {"samples": samples})
    _name_apart(described)
    notes = [f"steps are thinned to {MAX_ROWS:,}"] if any(run["thinned"] for run in described) else []
    notes += [f"of its events each run has the newest {MAX_EVENTS:,}"] if any(run["cut"] for run in described) else []
    data = {"written": time.time(), "notes": notes, "texts": list(texts), "runs": described}
    parts = {
        "REFRESH": "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s:g}">',
        "TITLE": html.escape(", ".join(run["name"] for run in described)),
        "STYLE": "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES),
        "DATA": _encode_for_script(data),
        "SCRIPT": "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    first, *rest = (ASSETS / REPORT).read_text(encoding="utf-8").split("@")
    # Between pairs of the sign stand names of parts; what is put in their place is not looked at again.
    return first + "".join(parts[text] if number % 2 == 0 else text for number, text in enumerate(rest))


def _encode_for_script(data: Any) -> str:
    """Return JSON that ends no script element and opens no comment, whatever texts it holds.

    Halves of surrogate pairs, which UTF-8 does not have, stay escaped.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _name_apart(runs: Sequence[dict[str, Any]]) -> None:
    """Name runs by their directories, with as many above as tell apart those that are called alike."""
    names = [run["name"] for run in runs]
    alike = tell_apart({Path(run["path"]) for run in runs if names.count(run["name"]) > 1})
    for run in runs:
        run["name"] = alike.get(Path(run["path"]), run["name"])


def write_at_end(output: Path) -> Path | None:
    """Write the page of a run that ends; returns its file, None where there is nothing to show. Never raises.

    A failure is a warning: it is no part of what the run was for.
    """
    if not (output / METRICS).exists():
        return None
    try:
        write_page([RunFiles(output)], output / REPORT)
    except ConfigError as error:
        log.warning("%s could not be written: %s", REPORT, error)
    except Exception as error:  # such as a file that somebody else has changed
        log.warning("%s could not be written: %s", REPORT, describe_error(error))
    else:
        return output / REPORT
    return None
