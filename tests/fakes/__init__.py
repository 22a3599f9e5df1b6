"""Stand-ins for whole processes. They speak the real protocols through the real code of the boundary."""
