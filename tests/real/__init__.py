"""Published models that package registries hold, and the main job on them; not part of the test suite."""
