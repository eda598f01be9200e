"""Placement: decides on which GPUs a SharePod goes. Pure: no I/O, no clock."""
