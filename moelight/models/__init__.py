"""Layer 5: one decoder for all families, in three layer phases: before attention, attention, after attention."""
