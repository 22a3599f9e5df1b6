"""People who use the console: their passwords, links and sessions."""
