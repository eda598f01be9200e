"""Telemetry: the agent's metrics and health over HTTP, safe to expose to any pod."""
