"""Layer 5: memory for experts and the KV cache, and which expert page is in which slot; for the engine and `attach`.

Does not depend on schedules or on what an expert computes.
"""
