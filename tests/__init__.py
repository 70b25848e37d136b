"""Tests, room for room as in the package."""
