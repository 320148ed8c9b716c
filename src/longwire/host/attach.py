"""`attach`: remote devices for a llama.cpp that somebody else drives."""

from __future__ import annotations

from collections.abc import Iterable

from longwire.client import remote
from longwire.client.credentials import Credentials
from longwire.client.device import RemoteDevice
from longwire.client.health import Deadlines
from longwire.transport.endpoint import Endpoint

__all__ = ["attach"]


def attach(
    endpoints: str | Iterable[Endpoint],
    *,
    engine: str = "llama-cpp-python",
    deadlines: Deadlines | None = None,
    credentials: Credentials | None = None,
) -> list[RemoteDevice]:
    """Register remote devices in the ggml of this process, for good.

        longwire.attach("10.0.0.2,10.0.0.3")
        llama = llama_cpp.Llama("model.gguf", n_gpu_layers=-1)

    From then on everything that lists ggml's devices sees them, and a model
    loaded with GPU layers is laid out over them. When a worker fails, calls
    into llama.cpp return its error codes; `device.connection.check()` of a
    returned device raises the reason.

    Raises:
        EndpointError: the text names no endpoints.
        RemoteError: an endpoint cannot be reached.
        VersionMismatch: an endpoint speaks another protocol.
        NativeError: the engine cannot be loaded.
    """
    devices = remote.connect(
        endpoints, engine=engine, deadlines=deadlines, credentials=credentials
    )
    for registry in dict.fromkeys(device.registry for device in devices):
        registry.register()
    return devices
