"""What benchmarks share: options, rounds, roofs, contestants in processes of their own, limits and results."""
