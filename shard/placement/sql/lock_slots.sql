-- Locks the slots exclusively for a moment. When the lock is taken, no enqueue that found one of the slots owned is
-- under way any more, and enqueues that wait will see what this transaction writes. Gives up after 100 ms, because
-- every other statement would queue behind this lock.
SET LOCAL lock_timeout = '100ms';
-- If the session that holds the lock freezes, Postgres ends it after 2 s.
SET LOCAL idle_in_transaction_session_timeout = '2s';
LOCK TABLE windrow.owned_slot IN ACCESS EXCLUSIVE MODE
