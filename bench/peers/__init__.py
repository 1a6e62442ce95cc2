"""Other queue systems, with which Windrow is compared. They are never dependencies of the product: see README.md."""
