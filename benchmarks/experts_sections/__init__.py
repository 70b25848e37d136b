"""The sections of `benchmarks/experts.py`: each measures and returns its figures."""
