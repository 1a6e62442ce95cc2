-- Records that the days before this day (YYYY-MM-DD) have turned cold.
UPDATE windrow.archive a SET until = greatest(a.until, %(past)s::date::timestamp AT TIME ZONE 'UTC')
