"""Floor 4: arenas of announced size, the page store with its rings, the paged KV cache. Refuses to know schedules."""
