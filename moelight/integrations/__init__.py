"""Integrations with other libraries and test harnesses. Each module depends on one library and imports it when it
runs."""
