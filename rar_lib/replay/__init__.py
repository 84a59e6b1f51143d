"""What to force: recording routes, replaying them, and the registries of modes and policies."""

from rar_lib.replay.contexts import recording, replaying
from rar_lib.replay.force import Replaying
from rar_lib.replay.record import Recording

__all__ = ["Recording", "Replaying", "recording", "replaying"]
