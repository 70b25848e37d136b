"""Kernels: one Python function per operation, a native implementation where it is built, a reference implementation in
torch.

Depends only on tensors and the instruction sets of this processor.
"""
