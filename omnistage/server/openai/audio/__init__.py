"""`/v1/audio/speech`, `/v1/audio/transcriptions` and `/v1/audio/translations`."""
