"""What a caller passes beside query, key and value: the list of keywords, and the check of each by itself."""
