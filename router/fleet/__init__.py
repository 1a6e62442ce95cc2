"""The shards as one router process sees them."""
