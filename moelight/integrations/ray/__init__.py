"""Jobs and Ray Data stages on Ray clusters."""
