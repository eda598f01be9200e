"""CSI driver for inline ephemeral volumes, by which a tenant's pod gets the tenant's directory: socket, limits and
hook."""
