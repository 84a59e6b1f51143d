"""Parity with other frameworks, each in an environment of its own."""
