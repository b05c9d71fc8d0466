"""Model families: one folder each, all that is special to it inside."""
