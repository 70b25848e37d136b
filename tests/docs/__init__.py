"""What README and docs show, run and compared."""
