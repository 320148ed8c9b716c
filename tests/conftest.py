"""What every test may count on."""

from __future__ import annotations

import signal

import pytest

from support.keys import Keys, make_keys

# A runner in the background starts with SIGINT ignored, and all children would
# inherit that: Ctrl-C could not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))
