"""Binpack: ranks places by the learned demand. The inner loops are C (native/)."""
