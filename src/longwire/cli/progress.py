"""The bar that a model load draws on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["load_progress"]


@contextmanager
def load_progress(console: Console, model: str) -> Iterator[Callable[[float], None]]:
    """Show a bar while the body runs; gives the function that moves it.

    Nothing is drawn where the console is no terminal.
    """
    path = Path(model)
    size = path.stat().st_size if path.is_file() else 0
    progress = Progress(
        TextColumn("loading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal or console.quiet,
    )
    with progress:
        task = progress.add_task(path.name, total=size)
        yield lambda share: progress.update(task, completed=share * size)
