"""Declarations: strict specs, presets, signatures and the errors every room may raise.

Importing this package imports pydantic and nothing heavy; it changes nothing.
"""
