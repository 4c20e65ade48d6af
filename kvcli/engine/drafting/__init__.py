"""What drafters and the engine share: the protocol, the KV of draft tokens, reports, draft heads."""
