"""Routing-aware replay: which of the recorded routes a trainer is made to follow, at one budget for all policies.

Names for what `rar_lib` computes, nothing else: scores and masks (fisher_mask), the policy file that the trainer reads
(replay_policy), what a plan does (diagnostics), and the records on disk (schema). Needs torch, numpy, pandas, pydantic and
safetensors; no engine and no GPU.
"""
