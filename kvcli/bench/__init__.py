"""Speed, memory and agreement of several sides on the same prompts, interleaved in one run."""
