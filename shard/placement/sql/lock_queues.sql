-- Prevents other sessions from creating or changing queues until the transaction ends. After that, sessions that have
-- waited see what this transaction has written about their orgs. Enqueues do not wait.
SET LOCAL lock_timeout = '100ms';
SET LOCAL idle_in_transaction_session_timeout = '2s';
LOCK TABLE windrow.queue IN SHARE ROW EXCLUSIVE MODE
