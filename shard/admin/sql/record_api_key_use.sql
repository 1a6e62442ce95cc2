-- Records that these API keys were used today. A row changes at most once a day.
UPDATE windrow.api_key SET last_used = current_date
WHERE id = ANY (%(ids)s::text[]) AND last_used IS DISTINCT FROM current_date
