"""One decoder for all families: before attention, after attention, router and experts."""
