"""Floor 1: facts about machines, models and workloads, as strict, frozen records. Refuses to know tensors and costs."""
