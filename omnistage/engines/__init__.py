"""Omnistage: engines."""
