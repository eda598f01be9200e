"""API: the objects of the group `sharepod.dev/v1alpha1` and what is valid in them. Pure: no I/O, no other room of
ours."""
