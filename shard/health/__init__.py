"""The doctor: reads facts about a server, and judges them."""
