"""What was routed: the packed record of the experts that a router chose."""

from rar_lib.traces.trace import RouteTrace, Status, TraceHeader

__all__ = ["RouteTrace", "Status", "TraceHeader"]
