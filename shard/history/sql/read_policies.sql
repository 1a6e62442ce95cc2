-- Returns the version of the org policies, and all policies by org. If there are no policies, returns one row without
-- an org.
SELECT v.changed, p.org, p.retention, p.held_since, p.held_for
FROM windrow.policies v
LEFT JOIN windrow.policy p ON true
ORDER BY p.org
