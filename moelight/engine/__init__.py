"""Prompts to completions: the batcher packs passes, the engine runs them, sampling picks the tokens."""
