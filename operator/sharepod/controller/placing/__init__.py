"""The placement loop, and the writer of ledgers."""
