"""Files that the agent keeps on its node: tenants' directories, its locks, and the state that it leaves to the next
agent."""
