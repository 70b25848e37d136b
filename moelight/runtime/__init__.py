"""Floor 6: lanes that carry out tasks, the one loop that walks a schedule, and what each kind of task does."""
