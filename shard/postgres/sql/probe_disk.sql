-- Writes 1 MB into a temporary file, which is deleted when the statement ends. Fails with disk_full if the disk is
-- full. Changes nothing else; a standby can run it too.
SELECT count(*)
-- OFFSET 0 makes Postgres set work_mem before it makes the rows, so that the rows do not fit into memory.
FROM (SELECT set_config('work_mem', '64kB', true) AS work_mem OFFSET 0) small
CROSS JOIN LATERAL unnest(array_fill(repeat('x', 8000 + 0 * length(small.work_mem)), ARRAY[128])) AS filler
