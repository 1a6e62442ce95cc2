"""Client processes that record what they see, and their parts."""
