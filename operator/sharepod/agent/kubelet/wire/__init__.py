"""Messages and gRPC services between agent and kubelet."""
