-- Forgets crashes that are a day old: there were too few of them for a quarantine.
DELETE FROM windrow.crash c WHERE c.at < now() - interval '1 day'
