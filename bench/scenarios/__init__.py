"""The scenarios: one file each, or a folder for a larger one."""
