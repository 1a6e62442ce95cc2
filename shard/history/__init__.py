"""Handles the finished jobs of one shard: turns days cold, drops and exports cold days, and erases orgs."""
