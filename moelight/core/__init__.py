"""Layer 0: the types that every package shares, and their units.

Depends only on the standard library; holds no tensors, devices or model shapes.
"""
