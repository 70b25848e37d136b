"""The sections of `benchmarks/pipeline.py`: each measures, prints its table and returns its figures."""
