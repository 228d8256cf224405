"""k3svc: prefill, decode and draft services for models of the Kimi-K3 family."""

__version__ = "0.1.0"
