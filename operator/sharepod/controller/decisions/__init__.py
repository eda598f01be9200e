"""What to do for one tenant, as pure functions over snapshots."""
