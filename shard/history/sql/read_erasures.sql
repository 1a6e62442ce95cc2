-- Returns the erasures with these ids, and what they have erased so far.
SELECT e.id::text, e.begun_at, e.ended_at, e.live, e.dead, e.finished, e.cold, e.dedup_keys, e.past_ids
FROM windrow.erasure e
WHERE e.id = ANY (%(ids)s::uuid[])
ORDER BY e.begun_at
