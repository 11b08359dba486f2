"""Prompts in, answers out: requests, sessions, refilled rows, generate and chat."""
