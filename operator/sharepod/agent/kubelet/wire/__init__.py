"""Messages and gRPC services by which agent and kubelet communicate."""
