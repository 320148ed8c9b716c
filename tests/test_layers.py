from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
LAYERS = "wire transport native server client host bench cli".split()


def check(*arguments: Path) -> tuple[int, str]:
    script = REPOSITORY / "tools" / "check_layers.py"
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True
    )
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with the layers of the real one and no import at all."""
    package = tmp_path / "longwire"
    package.mkdir()
    for module in ("__init__", "__main__", "errors"):
        (package / f"{module}.py").touch()
    for layer in LAYERS:
        (package / layer).mkdir()
        (package / layer / "__init__.py").touch()
    return package


def test_the_real_package_passes() -> None:
    assert check() == (0, "")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("wire/a.py", "import struct, numpy as np"),
        ("wire/a.py", "from longwire.wire.b import c"),
        ("wire/a.py", "from . import b"),
        ("wire/a.py", "from ..errors import BadFrame"),
        ("wire/a.py", "from longwire import errors"),
        ("transport/a.py", "from longwire.wire import frames"),
        ("native/a.py", "import ctypes"),
        ("native/a.py", "from ctypes import util"),
        ("server/a.py", "import longwire.native.abi"),
        ("server/a.py", "from blake3 import blake3"),
        ("client/a.py", "from longwire.transport.endpoint import Endpoint"),
        ("host/a.py", "from longwire.client import device"),
        ("bench/a.py", "from longwire import host, client, server"),
        ("cli/a.py", "from longwire import connect, bench"),
        ("__main__.py", "from longwire.cli.main import main"),
        ("__init__.py", "from longwire.client.device import connect"),
        ("__init__.py", "from .errors import LongwireError"),
    ],
)
def test_arrows_down_pass(package: Path, file: str, line: str) -> None:
    (package / file).write_text(line)
    assert check(package) == (0, "")


@pytest.mark.parametrize(
    ("file", "line", "reason"),
    [
        ("errors.py", "from longwire import wire", "errors may not import wire"),
        ("errors.py", "import numpy", "errors may not import the package numpy"),
        ("wire/a.py", "import longwire.client.b", "wire may not import client"),
        ("wire/a.py", "import blake3.x", "wire may not import the package blake3"),
        ("wire/a.py", "from ..native import abi", "wire may not import native"),
        ("wire/a.py", "from .. import transport", "wire may not import transport"),
        ("wire/b/c.py", "from ...host import d", "wire may not import host"),
        ("transport/a.py", "import longwire.native", "may not import native"),
        ("native/a.py", "from longwire.transport import b", "import transport"),
        ("client/a.py", "from longwire.server import b", "may not import server"),
        ("server/a.py", "from longwire.client.b import c", "may not import client"),
        ("server/a.py", "from longwire import connect", "may not import longwire"),
        ("server/a.py", "import longwire", "may not import longwire"),
        ("server/a.py", "from longwire import *", "may not import longwire"),
        ("client/a.py", "from longwire import host", "may not import host"),
        ("host/a.py", "from longwire.server import b", "may not import server"),
        ("bench/a.py", "from longwire.cli import main", "may not import cli"),
        ("__init__.py", "from longwire.cli import main", "may not import cli"),
        ("__init__.py", "from . import native", "may not import native"),
        ("__main__.py", "from longwire.server import b", "may not import server"),
        ("server/a.py", "import ctypes", "only native may import ctypes"),
        ("cli/a.py", "from ctypes.util import x", "only native may import ctypes"),
        ("wire/a.py", "import _ctypes", "only native may import ctypes"),
        ("utils.py", "import os", "utils has no place"),
        ("wire/a.py", "def f():\n  import longwire.cli", "wire may not import cli"),
    ],
)
def test_other_arrows_fail(package: Path, file: str, line: str, reason: str) -> None:
    (package / file).parent.mkdir(exist_ok=True)
    (package / file).write_text(f"\n{line}\n")
    code, output = check(package)
    number = line.count("\n") + 2
    assert code == 1
    assert output.startswith(f"{package / file}:{number}: ")
    assert output.count("\n") == 1
    assert reason in output


def test_type_checking_imports_count(package: Path) -> None:
    (package / "client" / "a.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from longwire.server.b import C\n"
    )
    code, output = check(package)
    assert code == 1
    assert "client/a.py:3: client may not import server" in output


def test_every_bad_import_is_named(package: Path) -> None:
    (package / "wire" / "a.py").write_text("from longwire import client, errors, cli")
    (package / "native" / "b.py").write_text("from longwire.host.c import d")
    code, output = check(package)
    assert code == 1
    assert len(output.splitlines()) == 3
