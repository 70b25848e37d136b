"""The sections of `jobs.py`."""
