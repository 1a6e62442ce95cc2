-- Marks in the history of a shard. A database that lacks a mark which the catalog has confirmed has lost history
-- (docs/decisions/0028-a-shard-that-lost-history.md).

-- On each shard: its newest marks. The token tells two marks of one number apart: after a restore numbers come again.
CREATE TABLE windrow.mark (
    number bigint PRIMARY KEY,
    token uuid NOT NULL UNIQUE,
    made_at timestamptz NOT NULL DEFAULT now()
);

-- In the catalog: the newest mark of each shard that is known to be in its database. NULL: none yet.
ALTER TABLE windrow.shard
    ADD COLUMN mark bigint,
    ADD COLUMN mark_token uuid,
    ADD COLUMN marked_at timestamptz,
    ADD CONSTRAINT mark_has_a_token CHECK ((mark IS NULL) = (mark_token IS NULL) AND (mark IS NULL) = (marked_at IS NULL));

-- Called by a statement that has stored dead jobs that were astray (bring_home.sql), for the same reason as refuse_settled.
CREATE FUNCTION windrow.refuse_revived(ids uuid[], queue_ids bigint[], since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (
        SELECT
        FROM (
            SELECT j.id, j.queue_id & 4294967295 AS org_id FROM windrow.job j WHERE j.id = ANY (ids)
            UNION ALL
            SELECT f.id, f.queue_id & 4294967295
            FROM windrow.finished f
            WHERE f.id = ANY (ids) AND f.finished_at >= since
            UNION ALL
            SELECT c.id, c.org_id FROM windrow.known_cold(ids, since) c
        ) known
        WHERE known.org_id = ANY (ARRAY(
            SELECT n.queue_id & 4294967295 FROM unnest(ids, queue_ids) AS n (id, queue_id) WHERE n.id = known.id
        ))
    )
    THEN
        RAISE EXCEPTION 'a job of this batch has already finished or lives' USING ERRCODE = 'WD001';
    END IF;
    RETURN false;
END
$$;
