"""Files that the agent keeps on its node: atomic replacement, tenants' directories, the handover to the next agent."""
