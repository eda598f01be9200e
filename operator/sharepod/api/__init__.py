"""API: the objects of the group `sharepod.dev/v1alpha1` and their validation. Pure: no I/O, no import of another
package of ours."""
