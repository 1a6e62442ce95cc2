-- The version of what orgs are told, and all of that, by org; one row without an org where none is told anything.
SELECT v.changed, p.org, p.retention, p.held_since, p.held_for
FROM windrow.policies v
LEFT JOIN windrow.policy p ON true
ORDER BY p.org
