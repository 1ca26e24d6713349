"""What a router is told: the tape of a checkpoint, the hook in the router, one call."""
