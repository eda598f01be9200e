"""The two images, operator's and agent's, made of Debian packages and Python wheels without a container engine."""
