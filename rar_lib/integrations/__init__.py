"""Replay policies inside other trainers: verl, and what uses Megatron-Core's own RouterReplay."""
