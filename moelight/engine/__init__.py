"""Floor 7: prompts in, completions out. The batcher fills passes, the engine runs them, sampling picks tokens."""
