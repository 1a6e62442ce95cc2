"""Models of protocols, explored state by state."""
