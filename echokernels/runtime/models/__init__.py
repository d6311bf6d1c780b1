"""Model definitions, one architecture per file."""
