-- Forgets crashes that are a day old: they were too few.
DELETE FROM windrow.crash c WHERE c.at < now() - interval '1 day'
