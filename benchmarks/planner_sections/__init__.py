"""The sections of `planner.py`, and the runs of `hrm_error.py`."""
