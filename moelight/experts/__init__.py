"""Which experts stay near, which come next, and where a missing one is computed. Keys and counters only; no bytes."""
