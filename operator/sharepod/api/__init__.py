"""The objects of the group `sharepod.dev/v1alpha1`, and what is valid in them. Pure: imports nothing of ours, does no
I/O.
"""
