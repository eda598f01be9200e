"""Binpack: ranks places by what it has learned of the demand. The inner loops are C (native/)."""
