-- Deletes the rows of full buckets, because a bucket without a row counts as full.
DELETE FROM windrow.token_bucket b
WHERE b.ctid = ANY(ARRAY(
    SELECT f.ctid
    FROM windrow.token_bucket f
    WHERE windrow.tokens_at(f, now()) >= f.amount
    FOR UPDATE SKIP LOCKED
))
