"""What can be measured: one file each, or a folder where there is more to it."""
