"""What was read, kept on disk: keys and values by the text they belong to, for who reads its beginning again."""
