"""Longwire: a ggml device at the far end of a network cable.

import longwire

with longwire.Engine("model.gguf", rpc="10.0.0.2,10.0.0.3") as engine:
    for token in engine.generate("Once upon a time"):
        print(token.text, end="", flush=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longwire.client.credentials import Credentials
    from longwire.client.device import RemoteDevice
    from longwire.client.health import Deadlines, Health
    from longwire.client.remote import close, connect
    from longwire.errors import (
        AuthenticationFailed,
        ConnectionLost,
        LongwireError,
        NativeError,
        ProtocolError,
        RemoteError,
        RemoteFailure,
        UsageError,
    )
    from longwire.host.attach import attach
    from longwire.host.engine import DeviceReport, Engine
    from longwire.host.generation import Generation, Token
    from longwire.host.sampling import Sampling

__all__ = [
    "AuthenticationFailed",
    "ConnectionLost",
    "Credentials",
    "Deadlines",
    "DeviceReport",
    "Engine",
    "Generation",
    "Health",
    "LongwireError",
    "NativeError",
    "ProtocolError",
    "RemoteDevice",
    "RemoteError",
    "RemoteFailure",
    "Sampling",
    "Token",
    "UsageError",
    "attach",
    "close",
    "connect",
]

_HOMES = {
    "Credentials": "longwire.client.credentials",
    "Deadlines": "longwire.client.health",
    "DeviceReport": "longwire.host.engine",
    "Engine": "longwire.host.engine",
    "Generation": "longwire.host.generation",
    "Health": "longwire.client.health",
    "RemoteDevice": "longwire.client.device",
    "Sampling": "longwire.host.sampling",
    "Token": "longwire.host.generation",
    "attach": "longwire.host.attach",
    "close": "longwire.client.remote",
    "connect": "longwire.client.remote",
}


def __getattr__(name: str) -> Any:
    # A session process must not pay for the host side when it starts.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "longwire.errors")), name)
