"""One sequence: its tokens, sampling, verification and commit, and the session that extends it."""
