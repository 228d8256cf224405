"""How the checkpoints under `models/` are made: corpus, target, rollouts, drafts, calibration, acceptance.

Outside the library: nothing in `k3svc` or `services` imports it.
"""
