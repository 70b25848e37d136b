"""The sections of `benchmarks/experts.py`."""
