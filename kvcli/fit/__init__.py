"""Whether a model, a profile and a context fit a machine, from config.json and file headers, before anything loads."""
