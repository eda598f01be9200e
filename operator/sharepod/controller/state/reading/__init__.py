"""Reading: how an object becomes facts. See README.md."""
