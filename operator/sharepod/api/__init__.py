"""API: the objects of the group `sharepod.dev/v1alpha1` and their validation. Pure: no I/O, and no import of another
SharePod package."""
