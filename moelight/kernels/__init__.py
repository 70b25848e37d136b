"""Kernels: one Python function per operation, native where the extension is built, else a reference in torch."""
