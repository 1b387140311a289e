"""Draw the same seconds of several timeline.json, a lane a worker, under each other. Needs the extra ``plot``.

python tests/benchmarks/draw_timeline.py OUT.png SECONDS LABEL=TIMELINE.json [LABEL=TIMELINE.json ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {"sample": "C0", "update": "C1"}
FIRST_STEP = 3
WAITING = "0.88"


def lanes(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the events of each worker; the driver's and validations are left out."""
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    own = [e for e in events if e["ph"] == "X" and not names[e["pid"]].startswith(("driver", "validation"))]
    return {name: [e for e in own if names[e["pid"]] == name] for name in sorted({names[e["pid"]] for e in own})}


def draw(out: Path, seconds: float, files: dict[str, Path]) -> None:
    """Write the picture of so many seconds of each file, from the third of its steps on."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(files), 1, figsize=(9, 1.5 * len(files) + 0.6), squeeze=False, sharex=True)
    for panel, (label, file) in zip(panels[:, 0], files.items(), strict=True):
        by_lane = lanes(file)
        steps = sorted({e["args"]["step"] for its in by_lane.values() for e in its})
        shown = steps[min(FIRST_STEP, len(steps)) - 1]
        first = min(e["ts"] for its in by_lane.values() for e in its if e["args"]["step"] == shown)
        for row, its in enumerate(by_lane.values()):
            for event in sorted(its, key=lambda e: e["cat"] == "busy"):
                start, length = (event["ts"] - first) / 1e6, event["dur"] / 1e6
                if start + length >= 0 and start <= seconds:
                    colour = COLOURS.get(event["name"], "C2") if event["cat"] == "busy" else WAITING
                    panel.barh(row, length, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
        panel.set_yticks(range(len(by_lane)), list(by_lane))
        panel.set_xlim(0, seconds)
        panel.set_title(label, loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("seconds")
    named = [matplotlib.patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=[*named, matplotlib.patches.Patch(color=WAITING, label="waits")], loc="lower right", ncols=4)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    if len(sys.argv) < 4 or not all("=" in argument for argument in sys.argv[3:]):
        sys.exit(__doc__)
    chosen = dict(argument.rsplit("=", 1) for argument in sys.argv[3:])
    draw(Path(sys.argv[1]), float(sys.argv[2]), {label: Path(file) for label, file in chosen.items()})
