"""Floor 5: one decoder for all families, in three acts: before attention, attention, after it."""
