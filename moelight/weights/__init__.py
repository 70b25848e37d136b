"""Checkpoints on disk: where they are, what they hold, and how their bytes reach an arena.

Knows files, tensor names and byte ranges. Refuses to know tiers, slots, kernels and the order of work.
"""
