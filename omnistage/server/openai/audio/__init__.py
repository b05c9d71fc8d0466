"""`/v1/audio/speech` and `/v1/audio/transcriptions`."""
