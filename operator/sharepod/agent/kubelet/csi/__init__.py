"""CSI driver for inline ephemeral volumes that carry a tenant's socket, limits and hook into its pod."""
