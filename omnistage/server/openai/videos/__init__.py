"""`/v1/videos`."""
