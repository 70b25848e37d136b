"""Profiles of machines, models and workloads: strict, frozen records. Does not depend on tensors or costs."""
