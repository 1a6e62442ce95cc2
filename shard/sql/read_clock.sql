-- By how many seconds the server's clock is behind the latest time that it has shown.
SELECT greatest(extract(epoch FROM c.latest - now()), 0)::float8 FROM windrow.clock c
