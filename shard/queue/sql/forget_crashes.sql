-- Forgets crashes that are a day old. They were too few for a quarantine.
DELETE FROM windrow.crash c WHERE c.at < now() - interval '1 day'
