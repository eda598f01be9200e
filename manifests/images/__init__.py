"""Maker of the operator's and the agent's image, from Debian packages and Python wheels, without a container engine."""
