"""What each attention head does: where it looks, what it retrieves, and what is lost when it may not look far.

Heads are KV heads: the query heads that share one are judged together, as memory is theirs together.
"""
