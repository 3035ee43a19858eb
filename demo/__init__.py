"""The demo: one story told by the running system, and a program of its own that checks what happened."""
