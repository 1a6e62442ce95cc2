-- Returns one org's policy, or no row if the org has the default policy.
SELECT p.org, p.retention, p.held_since, p.held_for FROM windrow.policy p WHERE p.org = %(org)s
