"""Runs tests with another build of the extension than the one beside the package.

    python tests/with_extension.py build/sanitize/_native.SUFFIX.so [arguments of pytest]

It takes the place of `moelight.kernels._native` before anything asks for it; processes that tests start have the usual.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

NAME = "moelight.kernels._native"


def main(path: str, arguments: list[str]) -> int:
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: not an extension")
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    sys.modules[NAME] = extension
    os.environ["MOELIGHT_EVERY_SERVER"] = "1"  # for `tests/kernels/conftest.py`
    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
