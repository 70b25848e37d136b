"""Measurement of this machine: its memory, processors, disk and links, through the code that passes run."""
