"""The messages of the protocol, from the package smg-grpc-proto. Import this module only where a gateway is wanted."""

from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2

__all__ = ["SERVICE", "common_pb2", "sglang_scheduler_pb2"]

SERVICE: str = sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
