"""Omnistage: engines/ar."""
