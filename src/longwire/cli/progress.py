"""The bars that a model load draws on a terminal: the whole, and each worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from longwire.client.uploader import Delivery
from longwire.host.upload import split_files

__all__ = ["LoadProgress", "load_progress"]


class LoadProgress:
    """What a load is told to draw; `Engine` takes both methods as they are."""

    def __init__(self, progress: Progress, model: Path) -> None:
        files = split_files(model)
        self._size = sum(file.stat().st_size for file in files if file.is_file())
        self._progress = progress
        self._whole = progress.add_task(model.name, total=self._size, there="")
        self._workers: dict[str, TaskID] = {}

    def on_progress(self, share: float) -> None:
        """Draw how much of the model is where it belongs."""
        self._progress.update(self._whole, completed=share * self._size)

    def on_delivery(self, deliveries: Sequence[Delivery]) -> None:
        """Draw what each worker has."""
        for delivery in deliveries:
            if delivery.total:
                self._draw(delivery)

    def _draw(self, delivery: Delivery) -> None:
        name = str(delivery.endpoint)
        if name not in self._workers:
            self._workers[name] = self._progress.add_task(f"  {name}", there="")
        there = delivery.from_store
        self._progress.update(
            self._workers[name],
            completed=delivery.done,
            total=delivery.total,
            there=f"{decimal(there)} were there already" if there else "",
        )


@contextmanager
def load_progress(console: Console, model: str) -> Iterator[LoadProgress]:
    """Show bars while the body runs; gives what moves them.

    Nothing is drawn where the console is no terminal.
    """
    progress = Progress(
        TextColumn("loading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[there]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal or console.quiet,
    )
    with progress:
        yield LoadProgress(progress, Path(model))
