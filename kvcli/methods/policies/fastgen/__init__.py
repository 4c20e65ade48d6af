"""FastGen: a policy for each head, chosen from its own attention."""
