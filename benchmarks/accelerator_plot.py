"""Draws the results of the accelerator benchmark beside fla-core and the floors.

python -m benchmarks.accelerator_plot RESULTS.json docs/performance-cuda.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

LEFT, WIDTH, BAR, GROUP = 250, 380.0, 13, 46
COLORS = {"k3svc": "#2a6fdb", "fla-core": "#d9822b", "floor": "#999"}

Group = tuple[str, dict[str, float]]
"""What was measured, and its bars."""


def groups(results: dict[str, Any]) -> list[tuple[str, list[Group]]]:
    """Charts of cases that fla-core was measured in, µs."""
    prompts = [
        (
            f"extend, H = {row['heads']}, {row['gate']} gate",
            {"k3svc": row["us"], "fla-core": row["fla_us"], "floor": row["floor_us"]},
        )
        for row in results["extend"]
        if "fla_us" in row
    ]
    steps = [
        (
            f"decode, H = {row['heads']}, batch {row['batch']}",
            {"k3svc": row["us"], "fla-core": row["fla_us"], "floor": row["copy_us"]},
        )
        for row in results["decode"]
        if "fla_us" in row
    ]
    return [
        ("Prompts of 8,192 tokens (µs; grey: byte floor)", prompts),
        ("Decode step (µs; grey: a copy of as many bytes)", steps),
    ]


def drawn(charts: list[tuple[str, list[Group]]]) -> str:
    """One SVG of all charts, one below the other; every chart has a scale of its own."""
    parts: list[str] = []
    top = 24
    for title, rows in charts:
        parts.append(f'<text x="10" y="{top}" font-weight="bold">{title}</text>')
        most = max(value for _, bars in rows for value in bars.values())
        top += 12
        for name, bars in rows:
            parts.append(f'<text x="10" y="{top + 22}">{name}</text>')
            for place, (kind, value) in enumerate(bars.items()):
                y, width = top + place * BAR, value / most * WIDTH
                parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="11" fill="{COLORS[kind]}"/>')
                shown = f"{kind} {value:,.0f}" if value >= 100 else f"{kind} {value:.1f}"
                parts.append(f'<text x="{LEFT + width + 4:.1f}" y="{y + 9.5}" font-size="10">{shown}</text>')
            top += GROUP
        top += 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{top - 20}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawn(groups(json.loads(Path(sys.argv[1]).read_text()))))
