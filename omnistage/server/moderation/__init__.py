"""Content filters: the interface, its application to requests, and a word list as an example."""
