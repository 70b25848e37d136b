"""What a sequence keeps between passes beside keys and values. Does not depend on the graph that fills it."""

from __future__ import annotations


class State:
    """Recurrent state and opaque caches of one sequence; empty for a graph of attention alone."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the state keeps."""
        return 0
