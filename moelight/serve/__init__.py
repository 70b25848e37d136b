"""Batches over HTTP or from a watched folder: OpenAI's Files and Batches, each batch a job in its own process.

Does not depend on models, prompts and rows: a batch is one input file, two output files and an exit code.
"""
