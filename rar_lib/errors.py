"""The errors that a user of the workbench meets. Each message names what, where, expected and found."""


class RarError(Exception):
    """Base of every error that the library raises on purpose."""


class ConfigError(RarError, ValueError):
    """A configuration that cannot be run: names the field, the value and what is allowed."""


class TraceError(RarError, ValueError):
    """A route trace that does not hold together, or does not fit the batch or model that it is used with."""


class UndecidedError(TraceError):
    """A file that can be read in more than one way, or not without something that only the caller knows."""


class ReplayError(RarError, RuntimeError):
    """Replay that is not live, or whose record does not fit the router that it meets."""


class EngineError(RarError, RuntimeError):
    """An engine that is missing, cannot do what was asked, or computes something else than it should."""


class DivergedError(EngineError):
    """An update had no finite gradient, so it was not taken: a run that meets it has diverged, and says at which step."""


class RunError(RarError, RuntimeError):
    """A run folder that is held, broken, or of another configuration."""
