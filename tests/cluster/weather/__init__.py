"""Bad weather between operator and API server: each fault played once on a real API server, and measured."""
