"""The HTTP API: routes by resource; bodies are parsed by hand so that the hot route stays cheap."""
