"""Batches over HTTP or out of a watched folder: OpenAI's Files and Batches, each batch a job of its own process.

Refuses to know models, prompts and rows: a batch is a file in, two files out and an exit code.
"""
