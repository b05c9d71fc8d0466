"""The HTTP application: routing, connections, body limits, streaming, errors."""
