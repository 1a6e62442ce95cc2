-- Counts an org's jobs with ids in a range, in all tables of this shard: live, dead, exported, finished and cold. With
-- `with_ids`, also returns the ids of these jobs, 16 bytes each, for a caller that compares them with the ids of other
-- shards. If a condition is about the death of jobs, the caller asks only for the state `dead`
-- (shard/admin/job_counts.py). The statement is planned for each run, so that Postgres searches only the partitions
-- from `since` on.
SELECT
    count(*) AS found,
    string_agg(uuid_send(f.id), ''::bytea) FILTER (WHERE %(with_ids)s) AS ids
FROM (
    SELECT j.id
    FROM windrow.job j
    WHERE j.queue_id = ANY (%(queue_ids)s::bigint[]) AND {{org_of(j)}} = %(org_id)s::bigint
        AND j.id >= %(from_id)s::uuid AND j.id < %(before_id)s::uuid
        AND (%(kind)s = '' OR j.kind = %(kind)s)
        AND (%(attributes)s::jsonb IS NULL OR j.attributes @> %(attributes)s::jsonb)
        AND %(states)s::text[] && '{blocked,scheduled,ready,leased}'
        AND CASE
            WHEN {{is_due(j)}} THEN 'ready'
            WHEN {{is_blocked(j)}} THEN 'blocked'
            WHEN j.lease IS NULL THEN 'scheduled'
            ELSE 'leased'
        END = ANY (%(states)s::text[])
    UNION ALL
    SELECT d.id
    FROM windrow.dead d
    WHERE d.queue_id = ANY (%(queue_ids)s::bigint[]) AND d.id >= %(from_id)s::uuid AND d.id < %(before_id)s::uuid
        AND (%(kind)s = '' OR d.kind = %(kind)s)
        AND (%(attributes)s::jsonb IS NULL OR d.attributes @> %(attributes)s::jsonb) AND 'dead' = ANY (%(states)s::text[])
        AND (%(died_after_us)s::bigint IS NULL OR d.finished_at >= timestamptz 'epoch' + %(died_after_us)s * interval '1 us')
        AND (%(died_before_us)s::bigint IS NULL OR d.finished_at < timestamptz 'epoch' + %(died_before_us)s * interval '1 us')
        AND NOT (%(not_killed)s AND coalesce((d.history -> -1 -> 'failure' ->> 'permanent')::boolean, false))
    UNION ALL
    SELECT d.id
    FROM (
        SELECT
            g.*,
            CASE
                WHEN g.reason IS NOT NULL THEN 'dead'
                WHEN g.run_at <= now() THEN 'ready'
                WHEN {{is_blocked(g)}} THEN 'blocked'
                ELSE 'scheduled'
            END AS state
        FROM windrow.departing g
        WHERE g.slot = %(slot)s::smallint
    ) d
    WHERE d.queue_id = ANY (%(queue_ids)s::bigint[]) AND d.id >= %(from_id)s::uuid AND d.id < %(before_id)s::uuid
        AND (%(kind)s = '' OR d.kind = %(kind)s)
        AND (%(attributes)s::jsonb IS NULL OR d.attributes @> %(attributes)s::jsonb) AND d.state = ANY (%(states)s::text[])
        AND (%(died_after_us)s::bigint IS NULL OR d.finished_at >= timestamptz 'epoch' + %(died_after_us)s * interval '1 us')
        AND (%(died_before_us)s::bigint IS NULL OR d.finished_at < timestamptz 'epoch' + %(died_before_us)s * interval '1 us')
        AND NOT (%(not_killed)s AND coalesce((d.history -> -1 -> 'failure' ->> 'permanent')::boolean, false))
    UNION ALL
    SELECT h.id
    FROM windrow.finished h
    WHERE {{org_of(h)}} = %(org_id)s::bigint
        AND (%(queue)s = '' OR h.queue_id = ANY (%(queue_ids)s::bigint[]))
        AND h.id >= %(from_id)s::uuid AND h.id < %(before_id)s::uuid AND h.finished_at >= %(since)s
        AND (%(kind)s = '' OR h.kind = %(kind)s)
        AND (%(attributes)s::jsonb IS NULL OR h.attributes @> %(attributes)s::jsonb)
        AND %(states)s::text[] && '{succeeded,cancelled}' AND h.state = ANY (%(states)s::text[])
    UNION ALL
    SELECT c.id
    FROM windrow.cold c
    WHERE {{org_of(c)}} = %(org_id)s::bigint
        AND (%(queue)s = '' OR c.queue_id = ANY (%(queue_ids)s::bigint[]))
        AND c.id >= %(from_id)s::uuid AND c.id < %(before_id)s::uuid AND c.finished_at >= %(since)s
        AND (%(kind)s = '' OR c.kind = %(kind)s)
        AND (%(attributes)s::jsonb IS NULL OR c.attributes @> %(attributes)s::jsonb)
        AND %(states)s::text[] && '{succeeded,cancelled}' AND c.state = ANY (%(states)s::text[])
) f
