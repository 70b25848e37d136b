"""Floor 3: what a run did, as figures and pictures. Reads timelines; refuses to know torch, lanes and clocks."""
