"""Divergences between student and teacher at response positions."""
