"""What to force: recording routes, replaying them, and the registries of modes and policies."""

from rar_lib.replay.contexts import Recording, Replaying, recording, replaying

__all__ = ["Recording", "Replaying", "recording", "replaying"]
