"""What a router is told: the tape of a checkpoint, the seam in the router, one decision."""
