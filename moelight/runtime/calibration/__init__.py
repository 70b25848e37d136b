"""Measurement of this machine: one module per kind of speed, each measured through the code that passes run."""
