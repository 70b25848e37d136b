"""Layer 8: the command line. Each command calls one function of a lower package and imports it when it runs."""
