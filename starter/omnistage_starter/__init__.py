"""The starter: small real models in one pipeline that hears, thinks, speaks and draws on any machine."""
