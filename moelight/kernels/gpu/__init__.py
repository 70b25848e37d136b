"""Kernels of the GPU, written in Triton where it is installed: grouped experts over pages, router, weighted sum.

Knows tensors, addresses and what a card can do. Refuses to know models, schedules and lanes, and why a page lies where
it lies. Triton is optional: every face has a twin in torch, and `serving` says who serves and why.
"""
