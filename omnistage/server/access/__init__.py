"""Access control: API keys, JSON web tokens, hosts, origins."""
