-- Records several changes in the audit log before they are made.
INSERT INTO windrow.audit (id, principal, peer, method, org, queue, request)
SELECT e.id, e.principal, e.peer, e.method, nullif(e.org, ''), nullif(e.queue, ''), e.request
FROM jsonb_to_recordset(%(entries)s::jsonb)
    AS e (id uuid, principal text, peer text, method text, org text, queue text, request jsonb)
-- Do nothing if the statement is repeated after a lost connection.
ON CONFLICT (id) DO NOTHING
