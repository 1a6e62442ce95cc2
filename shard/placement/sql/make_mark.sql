-- Writes the next mark, with a number above `above`, unless a mark was written in the last `apart_s` seconds. Keeps the
-- newest 100 marks. Returns the new mark and the earlier marks that are kept. Returns no row if no mark was written.
WITH kept AS MATERIALIZED (
    SELECT m.number, m.token, m.made_at FROM windrow.mark m
), made AS (
    INSERT INTO windrow.mark (number, token)
    SELECT greatest((SELECT max(k.number) FROM kept k), %(above)s, 0) + 1, gen_random_uuid()
    WHERE NOT EXISTS (
        SELECT FROM kept k WHERE k.made_at > now() - %(apart_s)s * interval '1 s' AND k.made_at <= now()
    )
    -- Do nothing if another session is inserting a mark with this number.
    ON CONFLICT DO NOTHING
    RETURNING number, token, made_at
), dropped AS (
    DELETE FROM windrow.mark m USING made WHERE m.number <= made.number - 100
)
SELECT
    made.number, made.token::text, made.made_at,
    (SELECT array_agg(k.token::text) FROM kept k) AS before,
    (SELECT min(k.number) FROM kept k) AS oldest
FROM made
