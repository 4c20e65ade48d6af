"""One pass, and the text that it makes longer: rows, feeds, engine, session. Read this folder first."""
