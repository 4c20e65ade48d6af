"""The HTTP server: OpenAI's API over one loaded model."""
