"""GPU kernels: grouped experts over pages, router, weighted sum.

Written in Triton, which is optional: every function has an implementation in torch, and `serving` selects one.
"""
