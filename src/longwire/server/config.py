"""What a supervisor tells its sessions, as one JSON text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from longwire.transport.tls import TlsFiles

__all__ = ["SessionConfig"]


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How each session of a server is set up."""

    engine: str
    n_threads: int
    protocol: int = 8
    devices: list[str] = field(default_factory=list)
    """Names; empty for the default choice."""
    cache_dir: str | None = None
    cache_limit: int | None = None
    models: list[str] = field(default_factory=list)
    """Folders of model files that weights may be taken from."""
    verbosity: int = 0
    grace_s: float = 10.0
    """How long a session may go on with what a client that left has asked for.
    The longest that matters is to put the last weight in the cache."""
    idle_timeout_s: float = 0.0
    """Silence between two commands that ends a session; 0: none does."""
    stall_timeout_s: float = 60.0
    """Silence within a message that ends a session; 0: none does."""
    token_file: str | None = None
    """Clients must prove that they know a token in it."""
    tls: TlsFiles | None = None
    """Files for TLS; None is plain TCP."""
    sandbox: bool = True
    """Give up what serving does not need, before the first client."""
    verify: bool = True
    """Check graphs before they run. Only a benchmark of that cost does without."""
    peer_port: int | None = None
    """Where the supervisor takes in streams of other servers."""
    log_format: str = "text"
    live_figures: bool = False
    """Report what was done so far about once per second, not only at the end."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> SessionConfig:
        fields = json.loads(text)
        if fields["tls"] is not None:
            fields["tls"] = TlsFiles(**fields["tls"])
        return cls(**fields)
