"""The sections of `quality.py`."""
