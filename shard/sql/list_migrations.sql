-- The migrations run here.
SELECT m.number, m.checksum, m.breaking FROM windrow.migration m
