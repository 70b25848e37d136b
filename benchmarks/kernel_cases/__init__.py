"""The cases of `benchmarks/kernels.py`, one module per family of kernels, and how contenders take turns."""
