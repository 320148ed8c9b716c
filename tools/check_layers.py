"""Fail on any import in src/longwire that points the wrong way.

Arrows point down only: what a folder may import is in `ALLOWED`, and a folder may
always import itself. Imports for type checkers count as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "longwire"
ROOT = "longwire/__init__.py"

_LOWER = {"native", "transport", "wire", "errors"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "timeline": set(),
    "wire": {"errors"},
    "transport": {"wire", "errors"},
    "native": {"wire", "errors"},
    "models": _LOWER,
    "server": {"models"} | _LOWER,
    "client": {"models"} | _LOWER,
    "tap": {"timeline", "transport", "wire", "errors"},
    "host": {"client", "models", "timeline"} | _LOWER,
    "bench": {"host", "client", "server", "models"} | _LOWER,
    "cli": {ROOT, "bench", "host", "client", "server", "tap", "timeline", "models"}
    | _LOWER,
    "__main__": {"cli"},
    ROOT: {"host", "client", "transport", "errors"},
}

FOREIGN: dict[str, set[str]] = {
    "errors": set(),
    "timeline": set(),
    "wire": {"fnv_c", "numpy"},
}
"""Packages beyond the standard library, for the folders that must stay pure."""


def violations(package: Path) -> list[str]:
    """`file:line: reason` for each import under `package` that is not allowed."""
    return [
        f"{file}:{line}: {reason}"
        for file in sorted(package.rglob("*.py"))
        for line, module in _imports(file, package)
        if (reason := _objection(_layer_of_file(file, package), module, package))
    ]


def _imports(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that `file` imports."""
    parents = (PACKAGE, *file.relative_to(package).parts[:-1])
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) + 1 - node.level] if node.level else ()
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def _objection(layer: str, module: str, package: Path) -> str | None:
    """Why `layer` may not import `module`, or None if it may."""
    top = module.partition(".")[0]
    if layer not in ALLOWED:
        return f"{layer} has no place among the layers of tools/check_layers.py"
    if top == PACKAGE:
        target = _layer_of_module(module, package)
        allowed = target == layer or target in ALLOWED[layer]
        return None if allowed else f"{layer} may not import {target} ({module})"
    if top in {"ctypes", "_ctypes"} and layer != "native":
        return f"only native may import ctypes, {layer} may not"
    pure = top in sys.stdlib_module_names or top in FOREIGN.get(layer, {top})
    return None if pure else f"{layer} may not import the package {top}"


def _layer_of_file(file: Path, package: Path) -> str:
    first = file.relative_to(package).parts[0].removesuffix(".py")
    return ROOT if first == "__init__" else first


def _layer_of_module(module: str, package: Path) -> str:
    """The layer that a dotted name below the package is in.

    A name that the package's `__init__` gives is of the root, not a layer.
    """
    name = module.split(".")[1] if "." in module else ""
    is_layer = (package / name).is_dir() or (package / f"{name}.py").is_file()
    return name if name in ALLOWED or (name and is_layer) else ROOT


def main(arguments: list[str]) -> int:
    """Check the package in the folder given, or this repository's."""
    default = Path(__file__).parents[1] / "src" / PACKAGE
    package = Path(arguments[0]) if arguments else default
    found = violations(package)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
