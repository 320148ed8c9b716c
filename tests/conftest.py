"""What every test may count on."""

from __future__ import annotations

import signal

# A runner in the background starts with SIGINT ignored, and all children would
# inherit that: Ctrl-C could not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
