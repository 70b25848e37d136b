"""The Hierarchical Roofline Model: flops, bytes and seconds computed from profiles and policies."""
