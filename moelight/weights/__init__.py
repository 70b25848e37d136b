"""Checkpoints on disk: locating them, listing their tensors, reading their bytes into arenas.

Depends on files, tensor names and byte ranges; does not depend on tiers, slots, kernels or schedules.
"""
