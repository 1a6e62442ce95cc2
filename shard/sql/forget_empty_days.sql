-- Out of the books of cold days: those of which nothing is left.
DELETE FROM windrow.archived a WHERE a.jobs = 0
