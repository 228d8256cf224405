"""Schemas of the vendor operators that the adapters use, as text: one a line."""
