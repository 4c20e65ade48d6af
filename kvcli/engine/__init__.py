"""Forward passes and the sequences they extend: rows, requests, engine, session. Read this folder first."""
