"""Models of any family: transformers' own module graph, suspended where attention and experts are needed."""
