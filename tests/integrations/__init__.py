"""Policies inside other trainers."""
