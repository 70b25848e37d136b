"""Floor 3: from a machine, a model and a workload to a plan."""
