-- Returns the migrations that have run on this database.
SELECT m.number, m.checksum, m.breaking FROM windrow.migration m
