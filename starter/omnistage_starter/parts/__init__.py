"""Real weights from ordinary package registries: the manifest, the store, fetching, conversion."""
