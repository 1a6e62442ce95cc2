"""The tests, in folders by what they need to run, and the static checks."""
