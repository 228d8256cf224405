"""Backends of the operation table. `load` is the only branch on hardware in the project."""
