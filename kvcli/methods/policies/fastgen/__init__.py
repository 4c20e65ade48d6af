"""FastGen: an eviction policy per head, chosen from the head's attention."""
