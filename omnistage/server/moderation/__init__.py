"""Content filters: the hook, how it is applied to requests, and a word list as the example."""
