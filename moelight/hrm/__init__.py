"""Floor 2, the Hierarchical Roofline Model: flops, bytes, seconds. Plain arithmetic over profiles and policies."""
