"""The API server, as the operator speaks to it: client, watches, lists, Lease, Events, work queue."""
