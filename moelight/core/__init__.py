"""Floor 0, the ground: the nouns every room shares, and their units.

Knows only the standard library. Refuses to know tensors, files, devices and models' shapes.
"""
