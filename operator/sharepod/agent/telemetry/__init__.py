"""Telemetry: the agent's metrics, traces and health over HTTP, safe to expose to any pod."""
