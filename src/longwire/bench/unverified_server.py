"""Our server without its check of graphs: `python -m longwire.bench.unverified_server`.

Only to measure what the check costs, on loopback and for its own benchmark.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from longwire.server.config import SessionConfig
from longwire.server.logs import log_to_stderr
from longwire.server.supervisor import Supervisor
from longwire.transport.endpoint import Endpoint

__all__ = ["main"]


def main() -> int:
    """Serve on a free loopback port, and say which once clients can connect."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--protocol", type=int, required=True)
    parser.add_argument("--cache", metavar="DIR")
    arguments = parser.parse_args()
    log_to_stderr("text", 1)
    config = SessionConfig(
        engine=arguments.engine,
        n_threads=arguments.threads,
        protocol=arguments.protocol,
        cache_dir=arguments.cache,
        verify=False,
    )
    Supervisor("127.0.0.1", 0, config, _announce).run()
    return 0


def _announce(address: tuple[str, int], report: dict[str, Any]) -> None:
    print(f"listening on {Endpoint(*address)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
