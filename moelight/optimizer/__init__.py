"""The optimizer: turns a machine, a model and a workload into a plan."""
