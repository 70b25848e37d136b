"""The reference kernels of stored formats: one module for each row of `moelight.formats.registry.FORMATS`."""
