"""Membership: where trainers report, are admitted, and find the group of each generation."""
