"""Layer 3: figures, traces and plots of a run, made from timelines. Does not depend on torch or the runtime."""
