-- Cancels jobs that have not finished, also leased and dead ones. Returns the cancelled jobs, and those on their way to
-- another shard (departing), which are not changed.
WITH live AS (
    DELETE FROM windrow.job j
    WHERE j.id = ANY (%(ids)s::uuid[])
        AND {{org_of(j)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    -- No history entry for a lease that ends here: its consumer gets STALE.
    RETURNING {{job_columns}}
), aside AS (
    DELETE FROM windrow.dead d
    WHERE d.id = ANY (%(ids)s::uuid[])
        AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
    RETURNING {{job_columns}}
), cancelled AS (
    INSERT INTO windrow.finished ({{job_columns}}, state, reason, finished_at, retention)
    SELECT
        ended.*, 'cancelled', %(reason)s,
        {{finish_time}},
        {{retention_of(ended)}}
    FROM (SELECT * FROM live UNION ALL SELECT * FROM aside) ended
    RETURNING id
)
SELECT c.id::text, false AS departing FROM cancelled c
UNION ALL
SELECT d.id::text, true
FROM windrow.departing d
WHERE d.id = ANY (%(ids)s::uuid[])
    AND {{org_of(d)}} = (SELECT o.org_id FROM windrow.org o WHERE o.org = %(org)s)
