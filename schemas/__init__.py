"""Contracts between the services: vocabulary, envelope, topics, events. Imports nothing of ours."""
