"""sglang.grpc.scheduler.SglangScheduler on prefill and decode, for public gateways such as smg.

A gateway sends token ids to decode services alone, which fetch the state of the prompt as they do for every request, or
the same request to a prefill and a decode service at once; the two then meet under the room that the gateway drew.
"""
