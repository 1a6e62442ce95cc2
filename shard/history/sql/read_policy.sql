-- One org's policy. No row: it has the default.
SELECT p.org, p.retention, p.held_since, p.held_for FROM windrow.policy p WHERE p.org = %(org)s
