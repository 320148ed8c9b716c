"""What a graph must fulfil before kernels run it.

ggml checks shapes where a graph is built, and its kernels trust that. A graph from
the wire was built elsewhere, so the same rules are checked here once more. Whether
the device can run an operation at all is not decided here.
"""

from longwire.server.verify.checker import verify_graph
from longwire.server.verify.indices import NO_INDICES, IndexPlan
from longwire.server.verify.rules import NO_DATA

__all__ = ["NO_DATA", "NO_INDICES", "IndexPlan", "verify_graph"]
