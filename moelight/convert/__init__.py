"""Checkpoints made of checkpoints: rounded, calibrated on prompts, and compared with what they were made of."""
