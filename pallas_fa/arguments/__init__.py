"""The arguments of a call: the list of keywords, what other libraries call them, and the check of each."""
