"""The former place of `moelight.formats.compressed_tensors`, for commands that import it from here."""

from moelight.formats.compressed_tensors import GROUPS, ROUNDED, Rounding

__all__ = ["GROUPS", "ROUNDED", "Rounding", "know_compressed_tensors"]


def know_compressed_tensors() -> None:
    """Nothing: configs of the method are read without being asked to."""
