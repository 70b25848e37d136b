"""The parts of `benchmarks/gpu.py`: each measures in processes of its own and keeps its figures as they come."""
