"""Other queue systems, to be measured beside Windrow. Never dependencies of the product: see README.md."""
