"""Floor 7: files of prompts become files of completions, line by line. Refuses to know models, tiers and lanes."""
