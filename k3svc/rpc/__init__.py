"""gRPC and protobuf end here: the wire formats, the servers, the peers. Nothing below knows of either."""
