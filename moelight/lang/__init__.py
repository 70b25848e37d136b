"""The ``.moe`` language: text to `experts.policy` objects and back, with every error at its line and column.

Depends on lark and the rules of the language, not on models, machines or files other than policies.
"""
