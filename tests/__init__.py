"""What is known to hold: the checks, and the tests by what they need."""
