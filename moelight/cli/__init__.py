"""Floor 8: the command line. Each command calls one function of the rooms below, imported when the command runs."""
