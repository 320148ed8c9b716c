"""What every test may count on."""

from __future__ import annotations

import signal

import pytest

from support.keys import Keys, make_keys

# A runner in the background starts with SIGINT ignored, one under nohup with SIGHUP,
# and all children would inherit that: Ctrl-C and reloads could not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))
