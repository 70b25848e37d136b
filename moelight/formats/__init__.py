"""Stored formats of matrices: one file and one row of `registry.FORMATS` for each; does not depend on torch."""
