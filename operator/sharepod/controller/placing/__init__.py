"""The placement loop, which decides places, and the writer that stores them in ledgers."""
