"""Telemetry: the agent's metrics and health over HTTP, safe to reach from any pod."""
