"""What eviction policies and the engine share: the protocol, compression points, recorded queries."""
