"""Load tests of decode services over the protocol itself: workload, load, figures, sweep and report.

Latencies are the caller's, in milliseconds where a name ends in `_ms`; names follow `vllm bench serve`.
"""
