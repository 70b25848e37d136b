"""Prompts to completions: plans, loaded models, batching, passes, sampling, constraints and text."""
