-- Locks the slots exclusively for a short time. When this session has the lock, all enqueues that found one of the
-- slots owned have ended, and enqueues that wait will see what this transaction writes. Gives up after 100 ms, because
-- all other statements queue behind this session while it waits.
SET LOCAL lock_timeout = '100ms';
-- If the session that holds the lock freezes, Postgres ends it after 2 s.
SET LOCAL idle_in_transaction_session_timeout = '2s';
LOCK TABLE windrow.owned_slot IN ACCESS EXCLUSIVE MODE
