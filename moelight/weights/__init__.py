"""Checkpoints on disk: where they are, their tensors, their bytes. Does not depend on tiers, slots or schedules."""
