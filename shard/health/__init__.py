"""The doctor: facts about a server, and what they mean."""
