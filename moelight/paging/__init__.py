"""Layer 5: memory for experts and the KV cache, and which expert page is in which slot; for the engine and `attach`."""
