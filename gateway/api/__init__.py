"""The HTTP routes. A handler parses, calls one service and responds."""
