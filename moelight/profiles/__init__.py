"""Layer 1: strict, frozen records about machines, models and workloads. Does not depend on tensors or costs."""
