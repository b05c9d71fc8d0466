"""Any other pipeline of diffusers, run whole: one request at a time, with diffusers' own loop."""
