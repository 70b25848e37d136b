"""Stand-in for an install without a compiler: the program where the extension cannot be imported."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.modules["moelight.kernels._native"] = None  # type: ignore[assignment]
    from moelight.cli.main import main

    sys.exit(main(sys.argv[1:]))
