"""Progress bars."""

from __future__ import annotations

import sys

from tqdm.auto import tqdm


def progress_bar(total: int, unit: str, initial: int = 0) -> tqdm:
    """A bar that a terminal sees move, and a log file every ten seconds."""
    interval = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=total,
        initial=initial,
        unit=unit,
        mininterval=interval,
        maxinterval=max(interval, 10.0),
    )
