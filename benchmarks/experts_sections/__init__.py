"""Sections of `benchmarks/experts.py`: each is a function that returns figures."""
