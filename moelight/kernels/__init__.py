"""Kernels: one small Python face per operation, a native implementation where there is one, a torch twin always.

Knows tensors and the instruction sets of this processor. Refuses to know models, pages, schedules and lanes.
"""
