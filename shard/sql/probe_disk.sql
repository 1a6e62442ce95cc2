-- Writes about 1 MB into a temporary file, which is gone when the statement ends: fails with disk_full where the disk is. Nothing
-- else is changed, and a standby can run it too.
SELECT count(*)
-- OFFSET 0 fence: set before the rows are made, which then do not fit into memory.
FROM (SELECT set_config('work_mem', '64kB', true) AS work_mem OFFSET 0) small
CROSS JOIN LATERAL generate_series(1, 40000 + 0 * length(small.work_mem)) AS n
