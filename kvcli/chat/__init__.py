"""The Python API of a loaded model: text sessions, turns and chats."""
