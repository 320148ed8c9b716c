"""What a server's log lines look like, in the supervisor and in its sessions."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from pythonjsonlogger.json import JsonFormatter

__all__ = ["FORMATS", "context", "log_to_stderr"]

FORMATS = ("text", "json")

context: dict[str, Any] = {}
"""Fields that every line of this process carries, such as who is being served."""

_TEXT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


class _Json(JsonFormatter):
    """One object per line; a record's `extra` and the context are fields of it."""

    def __init__(self) -> None:
        names = {"levelname": "level", "name": "logger", "process": "pid"}
        super().__init__(
            "".join(f"%({name})s" for name in ("asctime", *names, "message")),
            rename_fields={"asctime": "time", **names},
            datefmt="%Y-%m-%dT%H:%M:%S",
        )

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        moment = time.strftime(datefmt or "", time.gmtime(record.created))
        return f"{moment}.{int(record.msecs):03}Z"


def _with_context(record: logging.LogRecord) -> bool:
    for key, value in context.items():
        record.__dict__.setdefault(key, value)
    return True


def log_to_stderr(form: str, verbosity: int) -> None:
    """Warnings always; from 1 what happens, from 2 each command, from 3 the engine."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_with_context)
    handler.setFormatter(_Json() if form == "json" else logging.Formatter(_TEXT))
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    logging.basicConfig(handlers=[handler], level=level)
    if verbosity < 3:
        # llama.cpp warns about harmless things on every load.
        logging.getLogger("longwire.engine").setLevel(logging.WARNING)
