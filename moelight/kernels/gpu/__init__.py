"""GPU kernels, written in Triton: grouped experts over pages, router, weighted sum.

Depends only on tensors, addresses and the capabilities of a card. Triton is optional: every function has a reference
implementation in torch, and `serving` selects one and gives the reason.
"""
