"""Layer 4: arenas of announced size, the page store with its rings, the paged KV cache. Does not depend on
schedules.
"""
