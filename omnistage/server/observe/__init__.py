"""Audit log, metrics, tracing, status and live views."""
