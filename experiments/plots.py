"""Figures on disk: drawn without a display, written atomically."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def save_figure(
    path: Path, draw: Callable, size: tuple[float, float] = (10, 3.8)
) -> None:
    """Lets `draw` fill a figure and replaces a PNG file by it.

    Without matplotlib it says so and writes nothing: a machine that only trains need
    not have it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed")
        return
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(aside, format="png", dpi=120)
    os.replace(aside, path)
