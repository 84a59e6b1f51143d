"""Routing-aware replay for mixture-of-experts reinforcement learning.

Importing the package costs nothing: the engines (vLLM, Megatron-Core, Transformers) are imported when a run asks for
them, so that somebody with a dump of routes and no GPU needs none of them.
"""

__version__ = "0.1.0"
