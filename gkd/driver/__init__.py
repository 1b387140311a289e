"""One run from checked configuration to summary."""
