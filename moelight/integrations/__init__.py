"""Integrations with other libraries and test harnesses; each module depends on one library, imported when it runs."""
