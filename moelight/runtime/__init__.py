"""Lanes that run tasks, the executor that walks a schedule, and the implementation of each task kind."""
