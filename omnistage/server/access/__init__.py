"""Who may use the service: API keys, JSON web tokens, hosts, origins."""
