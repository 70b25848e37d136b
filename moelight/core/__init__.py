"""Layer 0: the types and units that every package shares. Imports only the standard library; no tensors, devices or
model shapes."""
