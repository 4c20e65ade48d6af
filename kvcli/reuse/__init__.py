"""Methods that take over keys and values behind another text than the one they were read behind."""
