#!/usr/bin/env python
"""Draw metrics of runs over steps: python recipes/plot.py OUT.png METRIC[,METRIC] LABEL=RUN_DIR [LABEL=RUN_DIR ...]

Needs the extra ``plot``. Each metric has a panel; thin lines are the values of every step, thick ones a running mean.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WINDOW = 10  # steps of the running mean


def read(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a run measured ``metric``, and the values."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    points = [(row["step"], row[metric]) for row in rows if metric in row]
    return [step for step, _ in points], [value for _, value in points]


def draw(out: Path, metrics: list[str], runs: dict[str, Path]) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(metrics), figsize=(5 * len(metrics), 3.4), squeeze=False)
    for panel, metric in zip(panels[0], metrics, strict=True):
        for number, (label, run) in enumerate(runs.items()):
            steps, values = read(run, metric)
            if len(values) < 5 * WINDOW:  # measured now and then
                panel.plot(steps, values, marker="o", markersize=3, color=f"C{number}", label=label)
                continue
            panel.plot(steps, values, color=f"C{number}", alpha=0.25, linewidth=0.8)
            means = [sum(values[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(values))]
            panel.plot(steps, means, color=f"C{number}", label=label)
        panel.set_xlabel("step")
        panel.set_title(metric)
        panel.grid(alpha=0.3)
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    if len(sys.argv) < 4 or not all("=" in argument for argument in sys.argv[3:]):
        sys.exit(__doc__)
    directories = dict(argument.split("=", 1) for argument in sys.argv[3:])
    draw(Path(sys.argv[1]), sys.argv[2].split(","), {label: Path(run) for label, run in directories.items()})
