"""The package compressed-tensors is asked in this process, as where all tests run: a child takes seconds a question."""

import compressed_tensors.quantization  # noqa: F401
