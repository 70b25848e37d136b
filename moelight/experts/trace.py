"""Placeholder until the replay branch lands."""


class RoutingTrace:
    def __init__(self, path): ...
