-- What one org is told. No row: nothing.
SELECT p.org, p.retention, p.held_since, p.held_for FROM windrow.policy p WHERE p.org = %(org)s
