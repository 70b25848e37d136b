"""Batch jobs: files of prompts in, files of completions out. Does not depend on models, tiers or lanes."""
