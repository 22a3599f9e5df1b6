"""One file per schema revision. They import nothing of ours: a migration means what it meant when it was written."""
