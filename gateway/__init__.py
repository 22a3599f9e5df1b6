"""The gateway process: text, identity and money. It never imports torch."""
