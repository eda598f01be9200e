"""The operator's connection to the API server: client, watches and lists, leader election, Events, work queue."""
