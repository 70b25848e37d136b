"""The ``.moe`` language: text to `experts.policy` objects and back, with every error at its line and column.

Knows lark and the language's rules. Refuses to know models, machines and files other than policies.
"""
