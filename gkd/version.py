"""The version of this code, which packaging reads from here and a run writes into its files."""

__version__ = "0.2.0"
