-- Removes entries without jobs from the books of cold days.
DELETE FROM windrow.archived a WHERE a.jobs = 0
