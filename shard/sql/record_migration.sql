-- Writes down that a migration was run.
INSERT INTO windrow.migration (number, name, checksum, breaking)
VALUES (%(number)s, %(name)s, %(checksum)s, %(breaking)s)
