"""Figures on disk: drawn without a display, written atomically."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from m2r2_jax.files import replacing


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
    with replacing(path) as aside:
        figure.savefig(aside, format="png", dpi=120)
